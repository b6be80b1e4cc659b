// The CPUs and the memory that this process may use under its cgroup limits and
// CPU affinity; the host may have more.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir::base {

struct MachineLimits {
  // How many threads can run at the same time: the CPUs of the affinity mask,
  // or the CPU quota (rounded down, at least 1) if it is lower.
  int cpus = 1;
  // The bytes of memory that the process may use: the smallest memory limit of
  // its cgroups, or the machine's RAM if that is smaller.
  int64_t memory_bytes = 0;
  // The part of memory_bytes that is free now: the limit minus what the cgroup
  // uses, but at most what the machine has available. Inactive file pages count
  // as free, because the kernel frees them when memory is needed.
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
