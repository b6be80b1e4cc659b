// What launches leave behind about the lines of a kernel, and how one is asked
// for: between emulator.cc and the runtime.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/guarded_memory.h"
#include "kernels/device/launcher.h"
#include "kernels/emulation/primitives.h"

namespace kvasir::kernels::emulation {

// Lines of one kernel, as they come.
struct SiteTable {
  static constexpr int kMost = 256;
  struct Entry {
    Site site;
    const char* kind;
    int64_t passes;
  };
  Entry entries[kMost];
  int count;
  // What is left out: a file's name without folders, and its index once it has
  // been come by. Null, -1: nothing.
  const char* out_file;
  int out_line;
  const char* out_kind;
  int out_index;
};
struct AccessTable {
  static constexpr int kMost = 256;
  struct Entry {
    Site site;
    bool shared, stores;
    int64_t requests, bytes, sectors, least_sectors, passes, least_passes;
  };
  Entry entries[kMost];
  int count;
};

// Who goes on where several threads could.
enum class ThreadOrder : uint8_t {
  kAny,     // any of them
  kByWarp,  // those of the warp whose random rank is the highest, now and then
            // any: one warp runs far ahead of the others
};

struct LaunchRequest {
  const KernelLaunch* kernel;
  SiteTable* sites;
  AccessTable* accesses;  // null: not counted
  // Device memory, ascending.
  const GuardedMemory::Range* ranges;
  size_t num_ranges;
  bool any_memory;  // all addresses are a kernel's
  ThreadOrder order;
  uint64_t random;
  uint32_t multiprocessors;
  uint32_t shared_bytes;  // at most, of a CTA
};

// Stacks and fibers, for one launch after the other. One that was given back
// (or null) serves the next who takes one.
class FiberPool;
FiberPool* TakeFiberPool();
void GiveFiberPool(FiberPool* pool);

// On the calling thread; returns when all CTAs have ended.
void RunLaunch(FiberPool& pool, const LaunchRequest& request);

}  // namespace kvasir::kernels::emulation
