// The process's own metrics, which Prometheus clients export by convention but
// prometheus-cpp does not.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {

// The exported numbers of /proc/PID/stat, in the kernel's units.
struct ProcessStat {
  uint64_t cpu_ticks = 0;  // user and system
  uint64_t threads = 0;
  uint64_t start_ticks = 0;  // since the machine's start
  uint64_t virtual_bytes = 0;
  uint64_t resident_pages = 0;
};

// Returns INTERNAL, with the field's number, if a field is missing or not
// a number.
absl::StatusOr<ProcessStat> ParseProcessStat(absl::string_view text);

// Exports the metric families process_*, which it reads from /proc/self at
// every scrape. A family that cannot be read is left out.
//
// Threads: its methods may be called from any thread.
class ProcessMetrics final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace kvasir::base
