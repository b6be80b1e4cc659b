// Emulator: runs kernels on the host, one CUDA thread at a time, and reports
// faults. A seed determines in which order the threads run.
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
  // Determines the order in which threads run and in which asynchronous copies
  // arrive. An odd seed chooses the next thread at random among those that can
  // run. An even seed mostly chooses a thread of the same warp, so that one
  // warp runs far ahead of the others.
  uint64_t seed = 1;
  // Number of CTAs that are resident at the same time.
  int multiprocessors = 4;
  // Whether the cost of memory accesses is counted (AccessCount); this makes a
  // run several times slower.
  bool count_accesses = false;
  // The largest shared memory of a CTA. The default is the limit of sm_80
  // (sm_90 has 227 KiB).
  int64_t shared_bytes = 163 << 10;
};

// A source line of a kernel that synchronizes: a barrier, fence, commit, wait,
// or an atomic that acquires or releases.
struct SyncSite {
  std::string file;  // without folders
  int line = 0;
  std::string kind;  // for example "SyncCta"
  // how often threads passed the site, even if it was left out
  int64_t passes = 0;
};

// The cost of a source line that loads or stores through a primitive. The n-th
// accesses of all lanes of a warp since the last barrier form one memory
// request.
struct AccessCount {
  std::string file;
  int line = 0;
  std::string kind;      // for example "global load"
  int64_t requests = 0;  // one request serves the lanes of a warp
  int64_t bytes = 0;     // bytes that the lanes requested
  int64_t sectors = 0;   // global memory: 32-byte sectors, over all requests
  // sectors that would suffice if the lanes' bytes were adjacent
  int64_t least_sectors = 0;
  int64_t passes = 0;  // shared memory: passes through the 32 banks
  // passes that would suffice without bank conflicts
  int64_t least_passes = 0;
};

// Frees the stacks that a destroyed emulator has left for the next one. Tests
// call this before they fork: ThreadSanitizer counts the fibers on these stacks
// as threads, and after a fork with several threads it reports no races in the
// child.
void FreeIdleStacks();

class FiberPool;

// Runs launches of kernels.
// Owns: the stacks on which the kernels' threads run.
class Emulator {
 public:
  // Kernels may access global memory through primitives only inside `memory`,
  // which must outlive the emulator. If it is null, they may access any
  // address.
  explicit Emulator(const EmulatorOptions& options,
                    const GuardedMemory* memory = nullptr);
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Runs the launch, and returns when all its CTAs have ended.
  void Run(const KernelLaunch& launch);

  const EmulatorOptions& options() const { return options_; }

  // The names of the kernels that have run so far.
  std::vector<std::string> Kernels() const;
  // All synchronizing lines of a kernel, and the costs of its loads and stores,
  // summed over all launches of the kernel so far. Both lists are in the order
  // in which threads first reached the lines.
  std::vector<SyncSite> SyncSites(const std::string& kernel) const;
  std::vector<AccessCount> Accesses(const std::string& kernel) const;
  // Makes this site of the kernel do nothing from now on. Must be called before
  // the kernel's first launch by this emulator.
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
