// The memory of a worker's device, read at every scrape (docs/metrics.md).
#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/device/device.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::cli {

// Threads: any. Families that cannot be read are left out.
class DeviceMetrics final : public prometheus::Collectable {
 public:
  // `share` of the memory may be taken in all.
  DeviceMetrics(const kernels::Device* device, double share)
      : share_(share), device_(device) {}

  // Before the device goes: nothing is told from then on.
  void Stop();
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const double share_;
  mutable base::Mutex mutex_;
  const kernels::Device* device_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
