// Metrics of a worker's device memory, which are read at every
// scrape (docs/metrics.md).
#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/device/device.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::cli {

// Metric families that cannot be read are left out.
// Threads: its methods may be called from any thread.
class DeviceMetrics final : public prometheus::Collectable {
 public:
  // `share` is the fraction of the device's memory that may be used.
  DeviceMetrics(const kernels::Device* device, double share)
      : share_(share), device_(device) {}

  // From now on, nothing is collected. Call it before the device is destroyed.
  void Stop();
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const double share_;
  mutable base::Mutex mutex_;
  const kernels::Device* device_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
