#include "base/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/string_view.h"

namespace kvasir::base {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::optional<std::string> ReadSmallFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<int64_t> ReadNumber(const std::string& path) {
  const auto text = ReadSmallFile(path);
  int64_t value = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) {
    return std::nullopt;
  }
  return value;
}

// Returns the size in bytes that follows `name` in a file of "Name: 123
// kB" lines.
std::optional<int64_t> KilobyteField(const std::string& text,
                                     std::string_view name) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(": \t"), absl::SkipEmpty());
    int64_t kilobytes = 0;
    if (words.size() >= 2 && StdView(words[0]) == name &&
        absl::SimpleAtoi(words[1], &kilobytes)) {
      return kilobytes * 1024;
    }
  }
  return std::nullopt;
}

// Returns the number that follows `name` in a file of "name 123" lines.
std::optional<int64_t> NumberField(const std::string& text,
                                   std::string_view name) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    int64_t value = 0;
    if (words.size() == 2 && StdView(words[0]) == name &&
        absl::SimpleAtoi(words[1], &value)) {
      return value;
    }
  }
  return std::nullopt;
}

struct GroupLimits {
  double cpus = std::numeric_limits<double>::infinity();
  int64_t memory_bytes = kNoLimit;
  int64_t memory_left_bytes = kNoLimit;
};

void LimitMemory(std::optional<int64_t> limit, std::optional<int64_t> usage,
                 GroupLimits* limits) {
  if (!limit.has_value() || *limit <= 0) return;
  limits->memory_bytes = std::min(limits->memory_bytes, *limit);
  if (usage.has_value()) {
    limits->memory_left_bytes = std::min(limits->memory_left_bytes,
                                         std::max(int64_t{0}, *limit - *usage));
  }
}

// Returns the bytes of memory that a cgroup uses, without its inactive file
// pages. The kernel frees these pages before it refuses an allocation. If they
// counted, a checkpoint that was just read would appear as used memory.
// `reclaimable` is the field of the stat file that counts them.
std::optional<int64_t> ReadUsage(const std::string& usage_path,
                                 const std::string& stat_path,
                                 std::string_view reclaimable) {
  const auto usage = ReadNumber(usage_path);
  if (!usage.has_value()) return std::nullopt;
  const std::string stat = ReadSmallFile(stat_path).value_or("");
  const int64_t cached = NumberField(stat, reclaimable).value_or(0);
  return *usage - std::clamp(cached, int64_t{0}, std::max(int64_t{0}, *usage));
}

void LimitCpu(double quota, double period, GroupLimits* limits) {
  if (quota > 0 && period > 0) {
    limits->cpus = std::min(limits->cpus, quota / period);
  }
}

// Reads the limits of a cgroup v2, which has all its files in one folder.
void ReadUnified(const std::string& folder, GroupLimits* limits) {
  if (const auto text = ReadSmallFile(folder + "/cpu.max")) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
    double quota = 0, period = 0;
    if (words.size() == 2 && absl::SimpleAtod(words[0], &quota) &&
        absl::SimpleAtod(words[1], &period)) {
      LimitCpu(quota, period, limits);
    }
  }
  LimitMemory(ReadNumber(folder + "/memory.max"),
              ReadUsage(folder + "/memory.current", folder + "/memory.stat",
                        "inactive_file"),
              limits);
}

void ReadCpuController(const std::string& folder, GroupLimits* limits) {
  const auto quota = ReadNumber(folder + "/cpu.cfs_quota_us");
  const auto period = ReadNumber(folder + "/cpu.cfs_period_us");
  if (quota.has_value() && period.has_value()) {
    LimitCpu(static_cast<double>(*quota), static_cast<double>(*period), limits);
  }
}

void ReadMemoryController(const std::string& folder, GroupLimits* limits) {
  LimitMemory(ReadNumber(folder + "/memory.limit_in_bytes"),
              ReadUsage(folder + "/memory.usage_in_bytes",
                        folder + "/memory.stat", "total_inactive_file"),
              limits);
}

// Calls read(folder) for the cgroup `group` and all its parents, because each
// of them may set a limit.
template <typename Read>
void WalkUp(const std::string& mount, std::string group, const Read& read) {
  for (;;) {
    read(mount + group);
    if (group.empty() || group == "/") return;
    group.resize(group.find_last_of('/'));
  }
}

// Applies one line of /proc/self/cgroup: "0::/path" (v2) or
// "4:cpu,cpuacct:/path" (v1).
void ReadGroupLine(const std::string& root, absl::string_view line,
                   GroupLimits* limits) {
  const std::vector<std::string> fields =
      absl::StrSplit(line, absl::MaxSplits(':', 2));
  if (fields.size() != 3) return;
  const std::string mount = root + "/sys/fs/cgroup";
  if (fields[0] == "0" && fields[1].empty()) {
    WalkUp(mount, fields[2],
           [&](const std::string& folder) { ReadUnified(folder, limits); });
    return;
  }
  for (const absl::string_view controller : absl::StrSplit(fields[1], ',')) {
    if (controller == "cpu") {
      for (const char* name : {"/cpu", "/cpu,cpuacct"}) {
        WalkUp(mount + name, fields[2], [&](const std::string& folder) {
          ReadCpuController(folder, limits);
        });
      }
    } else if (controller == "memory") {
      WalkUp(mount + "/memory", fields[2], [&](const std::string& folder) {
        ReadMemoryController(folder, limits);
      });
    }
  }
}

}  // namespace

MachineLimits ReadMachineLimitsAt(const std::string& root, int affinity_cpus) {
  GroupLimits group;
  if (const auto text = ReadSmallFile(root + "/proc/self/cgroup")) {
    for (const absl::string_view line :
         absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
      ReadGroupLine(root, line, &group);
    }
  }
  MachineLimits limits;
  limits.cpus = std::max(1, affinity_cpus);
  if (group.cpus < limits.cpus) {
    limits.cpus = std::max(1, static_cast<int>(group.cpus));
  }
  const std::string memory = ReadSmallFile(root + "/proc/meminfo").value_or("");
  const int64_t total = KilobyteField(memory, "MemTotal").value_or(kNoLimit);
  const int64_t available =
      KilobyteField(memory, "MemAvailable").value_or(total);
  limits.memory_bytes = std::min(total, group.memory_bytes);
  limits.available_bytes =
      std::min({available, group.memory_left_bytes, limits.memory_bytes});
  return limits;
}

MachineLimits ReadMachineLimits() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int affinity = sched_getaffinity(0, sizeof set, &set) == 0
                           ? CPU_COUNT(&set)
                           : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return ReadMachineLimitsAt("", affinity);
}

ResidentMemory ReadResidentMemory() {
  const std::string text = ReadSmallFile("/proc/self/status").value_or("");
  return {.bytes = KilobyteField(text, "VmRSS").value_or(0),
          .peak_bytes = KilobyteField(text, "VmHWM").value_or(0)};
}

int64_t LastLevelCacheBytes() {
  int64_t largest = 0;
  for (const int name :
       {_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL4_CACHE_SIZE}) {
    largest = std::max(largest, static_cast<int64_t>(sysconf(name)));
  }
  return largest;
}

std::string CpuModelName() {
  const std::string text = ReadSmallFile("/proc/cpuinfo").value_or("");
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<std::string> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (fields.size() == 2 && fields[0].rfind("model name", 0) == 0) {
      const size_t begin = fields[1].find_first_not_of(' ');
      if (begin != std::string::npos) return fields[1].substr(begin);
    }
  }
  return "unknown";
}

}  // namespace kvasir::base
