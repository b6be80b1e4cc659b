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
  // Another seed is another order of threads and of what lands when. By odd
  // ones any thread goes on, by even ones mostly those of one warp, which runs
  // far ahead of the others.
  uint64_t seed = 1;
  // CTAs that are resident at a time, one on each.
  int multiprocessors = 4;
  // Adds what accesses cost (AccessCount); several times slower.
  bool count_accesses = false;
  // Shared memory that a CTA may have: sm_80's (sm_90 has 227 KiB).
  int64_t shared_bytes = 163 << 10;
};

// A line that synchronizes: a barrier, fence, commit, wait, or an atomic that
// acquires or releases.
struct SyncSite {
  std::string file;  // without its folders
  int line = 0;
  std::string kind;    // "SyncCta"
  int64_t passes = 0;  // by threads, or left out
};

// What a line cost that loads or stores through a primitive. Accesses of a warp
// belong together when they are its lanes' n-th at the line since the last
// barrier.
struct AccessCount {
  std::string file;
  int line = 0;
  std::string kind;           // "global load"
  int64_t requests = 0;       // by warps
  int64_t bytes = 0;          // that lanes asked for
  int64_t sectors = 0;        // global: of 32 bytes, over all requests
  int64_t least_sectors = 0;  // if they lay side by side
  int64_t passes = 0;         // shared: through the 32 banks
  int64_t least_passes = 0;   // without conflicts
};

// Stacks stay for the next emulator of the process when one ends; this frees
// them. To ThreadSanitizer their threads are threads, and it judges nothing in
// the child of a process that has several: a test does this before it forks.
void FreeIdleStacks();

class FiberPool;

// Owns: the stacks of threads.
// Threads: all methods may be called from any thread; launches run one after
//   the other, each on the thread that asks for it.
// Errors: a kernel that breaks a rule (out of bounds, misaligned, divergent,
//   a deadlock) ends the process by a message on stderr.
class Emulator {
 public:
  // `memory` (or null: any address is a kernel's) is where global accesses
  // through primitives must lie; it outlives the emulator.
  explicit Emulator(const EmulatorOptions& options,
                    const GuardedMemory* memory = nullptr);
  ~Emulator();
  Emulator(const Emulator&) = delete;
  Emulator& operator=(const Emulator&) = delete;

  // Returns when all CTAs have ended.
  void Run(const KernelLaunch& launch);

  const EmulatorOptions& options() const { return options_; }

  // Those that have run so far, by name.
  std::vector<std::string> Kernels() const;
  // Of the launches of a kernel so far, in the order of their first passes.
  std::vector<SyncSite> SyncSites(const std::string& kernel) const;
  std::vector<AccessCount> Accesses(const std::string& kernel) const;
  // From now on this site of the kernel does nothing. It must not have been
  // passed by this emulator: before its first launch.
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
