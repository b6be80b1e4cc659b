#include "base/net/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

// Reads a file of the kernel; returns "" if it does not exist.
std::string ReadAll(const char* path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Returns when the machine started, in seconds since 1970.
std::optional<double> BootTime() {
  for (const absl::string_view line :
       absl::StrSplit(ReadAll("/proc/stat"), '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    double seconds = 0;
    if (words.size() == 2 && words[0] == "btime" &&
        absl::SimpleAtod(words[1], &seconds)) {
      return seconds;
    }
  }
  return std::nullopt;
}

std::optional<double> OpenDescriptors() {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  if (error) return std::nullopt;
  double count = 0;
  for (; entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    if (error) return std::nullopt;
    ++count;
  }
  return count - 1;  // without the descriptor of the folder itself
}

std::optional<double> MaxDescriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::nullopt;
  return static_cast<double>(limit.rlim_cur);
}

}  // namespace

absl::StatusOr<ProcessStat> ParseProcessStat(absl::string_view text) {
  // The second field is the program's name in parentheses, which may itself
  // contain parentheses and spaces.
  const size_t name_end = text.rfind(')');
  if (name_end == absl::string_view::npos) {
    return absl::InternalError(
        "/proc/self/stat contains no program name in parentheses");
  }
  const std::vector<absl::string_view> behind = absl::StrSplit(
      text.substr(name_end + 1), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  // Field numbers are those of proc(5), which begins with 1. The first field
  // after the name is field 3.
  const auto field = [&](size_t number) -> absl::StatusOr<uint64_t> {
    uint64_t value = 0;
    if (number - 3 >= behind.size() ||
        !absl::SimpleAtoi(behind[number - 3], &value)) {
      return absl::InternalError(absl::StrCat("/proc/self/stat: field ", number,
                                              " is missing or not a number"));
    }
    return value;
  };
  ProcessStat stat;
  KVASIR_ASSIGN_OR_RETURN(const uint64_t user, field(14));
  KVASIR_ASSIGN_OR_RETURN(const uint64_t system, field(15));
  stat.cpu_ticks = user + system;
  KVASIR_ASSIGN_OR_RETURN(stat.threads, field(20));
  KVASIR_ASSIGN_OR_RETURN(stat.start_ticks, field(22));
  KVASIR_ASSIGN_OR_RETURN(stat.virtual_bytes, field(23));
  KVASIR_ASSIGN_OR_RETURN(stat.resident_pages, field(24));
  return stat;
}

std::vector<prometheus::MetricFamily> ProcessMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  const auto add = [&families](const char* name, const char* help,
                               prometheus::MetricType type,
                               std::optional<double> value) {
    if (!value.has_value()) return;
    prometheus::ClientMetric metric;
    metric.gauge.value = *value;
    metric.counter.value = *value;
    families.push_back({name, help, type, {std::move(metric)}});
  };
  const auto stat = ParseProcessStat(ReadAll("/proc/self/stat"));
  if (stat.ok()) {
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    const auto page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
    add("process_cpu_seconds_total", "Processor time spent, user and system",
        prometheus::MetricType::Counter,
        static_cast<double>(stat->cpu_ticks) / ticks);
    add("process_resident_memory_bytes", "Bytes of memory that are in RAM",
        prometheus::MetricType::Gauge,
        static_cast<double>(stat->resident_pages) * page_bytes);
    add("process_virtual_memory_bytes", "Bytes of address space",
        prometheus::MetricType::Gauge,
        static_cast<double>(stat->virtual_bytes));
    add("process_threads", "Threads of the process",
        prometheus::MetricType::Gauge, static_cast<double>(stat->threads));
    if (const std::optional<double> boot = BootTime(); boot.has_value()) {
      add("process_start_time_seconds",
          "When the process started, in seconds since 1970",
          prometheus::MetricType::Gauge,
          *boot + static_cast<double>(stat->start_ticks) / ticks);
    }
  }
  add("process_open_fds", "Open file descriptors",
      prometheus::MetricType::Gauge, OpenDescriptors());
  add("process_max_fds", "The most file descriptors that may be open",
      prometheus::MetricType::Gauge, MaxDescriptors());
  return families;
}

}  // namespace kvasir::base
