// What this process may use: CPUs and memory by cgroup limits and affinity,
// not what the host has.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::base {

struct MachineLimits {
  // Threads worth starting: the affinity mask, cut by the CPU quota (rounded
  // down, at least 1).
  int cpus = 1;
  // Bytes that the process may hold in all: the smallest memory limit of its
  // cgroups, at most the machine's RAM.
  int64_t memory_bytes = 0;
  // Of those, what is left now: limit minus what the cgroup uses (inactive file
  // pages do not count: the kernel reclaims them), at most what the machine has
  // available.
  int64_t available_bytes = 0;
};

// Reads the limits now; cheap enough to ask again.
MachineLimits ReadMachineLimits();

// The same below another root, for tests: `root`/proc/self/cgroup,
// `root`/proc/meminfo, `root`/sys/fs/cgroup; `affinity_cpus` in place of the
// mask. What cannot be read does not limit.
MachineLimits ReadMachineLimitsAt(const std::string& root, int affinity_cpus);

struct ResidentMemory {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};
ResidentMemory ReadResidentMemory();

// Bytes of the largest cache level that the CPU tells of; 0 if unknown.
int64_t LastLevelCacheBytes();

// "Intel(R) Xeon(R) Processor" as the kernel names it; "unknown".
std::string CpuModelName();

}  // namespace kvasir::base
