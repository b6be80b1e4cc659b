// The CPUs and the memory that this process may use under its cgroup limits and
// CPU affinity; the host may have more.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::base {

struct MachineLimits {
  // The number of threads worth starting: the CPUs of the affinity mask, but at
  // most the CPU quota (rounded down, at least 1).
  int cpus = 1;
  // Bytes that the process may hold in all: the smallest memory limit of its
  // cgroups, at most the machine's RAM.
  int64_t memory_bytes = 0;
  // The part of memory_bytes that is unused now: the limit minus what the
  // cgroup uses, but at most what the machine has available. Inactive file
  // pages count as unused, because the kernel reclaims them.
  int64_t available_bytes = 0;
};

// Reads the limits now. Cheap enough to call repeatedly.
MachineLimits ReadMachineLimits();

// ReadMachineLimits with another root folder, for tests: reads
// `root`/proc/self/cgroup, `root`/proc/meminfo and `root`/sys/fs/cgroup, and
// takes `affinity_cpus` instead of the affinity mask. A file that cannot be
// read sets no limit.
MachineLimits ReadMachineLimitsAt(const std::string& root, int affinity_cpus);

struct ResidentMemory {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};
ResidentMemory ReadResidentMemory();

// Returns the size in bytes of the largest cache level that the CPU reports; 0
// if unknown.
int64_t LastLevelCacheBytes();

// Returns the kernel's name for the CPU, such as "Intel(R) Xeon(R) Processor";
// "unknown" if there is none.
std::string CpuModelName();

}  // namespace kvasir::base
