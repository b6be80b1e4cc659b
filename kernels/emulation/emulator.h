// Runs kernels on the host, thread by thread, in an order that a seed decides.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/device/guarded_memory.h"
#include "kernels/device/launcher.h"

namespace kvasir::kernels::emulation {

struct EmulatorOptions {
  // The seed decides the order of threads and of copies that land. With an odd
  // seed, the next thread is any ready one. With an even seed, it is mostly a
  // thread of one warp, which runs far ahead of the others.
  uint64_t seed = 1;
  // Number of CTAs that are resident at a time.
  int multiprocessors = 4;
  // Also counts the cost of accesses (AccessCount); several times slower.
  bool count_accesses = false;
  // The largest shared memory of a CTA. The default is the limit of sm_80
  // (sm_90 has 227 KiB).
  int64_t shared_bytes = 163 << 10;
};

// A source line that synchronizes: a barrier, fence, commit, wait, or an atomic
// that acquires or releases.
struct SyncSite {
  std::string file;  // without folders
  int line = 0;
  std::string kind;    // for example "SyncCta"
  int64_t passes = 0;  // number of passes by threads, also while left out
};

// Cost of a source line that loads or stores through a primitive. The n-th
// accesses of a warp's lanes at the line since the last barrier form one
// request.
struct AccessCount {
  std::string file;
  int line = 0;
  std::string kind;      // for example "global load"
  int64_t requests = 0;  // counted per warp
  int64_t bytes = 0;     // bytes that the lanes requested
  int64_t sectors = 0;   // global memory: 32-byte sectors, over all requests
  int64_t least_sectors = 0;  // sectors if the lanes' bytes were adjacent
  int64_t passes = 0;         // shared memory: passes through the 32 banks
  int64_t least_passes = 0;   // passes without bank conflicts
};

// When an emulator ends, its stacks stay for the next one of the process; this
// frees them. ThreadSanitizer counts the fibers on them as threads, and reports
// nothing in the child of a process with several threads. A test calls this
// before it forks.
void FreeIdleStacks();

class FiberPool;

// Owns: the stacks of threads.
class Emulator {
 public:
  // Global accesses through primitives must lie in `memory`, which outlives the
  // emulator; if null, any address is allowed.
  explicit Emulator(const EmulatorOptions& options,
                    const GuardedMemory* memory = nullptr);
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Returns when all CTAs have ended.
  void Run(const KernelLaunch& launch);

  const EmulatorOptions& options() const { return options_; }

  // The names of the kernels that have run so far.
  std::vector<std::string> Kernels() const;
  // The sites, and the costs of accesses, over all launches of a kernel so far,
  // each in the order of their first passes.
  std::vector<SyncSite> SyncSites(const std::string& kernel) const;
  std::vector<AccessCount> Accesses(const std::string& kernel) const;
  // From now on this site of the kernel does nothing. Call it before the
  // kernel's first launch by this emulator.
  void LeaveOut(const std::string& kernel, const SyncSite& site);
  int64_t launches() const;

 private:
  struct Kernel;
  Kernel& KernelOf(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EmulatorOptions options_;
  const GuardedMemory* const memory_;
  mutable base::Mutex mutex_;
  FiberPool* const pool_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::unique_ptr<Kernel>> kernels_
      ABSL_GUARDED_BY(mutex_);
  int64_t launches_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::kernels::emulation
