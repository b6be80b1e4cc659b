// The interface between emulator.cc and the runtime: the request for one
// launch, and the tables about a kernel's source lines that launches fill in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/guarded_memory.h"
#include "kernels/device/launcher.h"
#include "kernels/emulation/primitives.h"

namespace kvasir::kernels::emulation {

// The synchronizing lines of one kernel, in the order in which threads first
// reached them.
struct SiteTable {
  static constexpr int kMost = 256;
  struct Entry {
    Site site;
    const char* kind;
    int64_t passes;
  };
  Entry entries[kMost];
  int count;
  // The site that does nothing (Emulator::LeaveOut). out_file is a name without
  // folders, or null if no site is left out. out_index is the site's index in
  // `entries`, or -1 until a thread reaches it.
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

// How the next thread is chosen when several are ready.
enum class ThreadOrder : uint8_t {
  kAny,  // at random
  // Mostly a thread of the ready warp with the lowest rank, so that this warp
  // runs far ahead of the others.
  kByWarp,
};

struct LaunchRequest {
  const KernelLaunch* kernel;
  SiteTable* sites;
  AccessTable* accesses;  // null: accesses are not counted
  // Allocations of device memory, by ascending address.
  const GuardedMemory::Range* ranges;
  size_t num_ranges;
  bool any_memory;  // kernels may access any address
  ThreadOrder order;
  uint64_t random;
  uint32_t multiprocessors;
  uint32_t shared_bytes;  // the largest shared memory of a CTA
};

// Stacks and fibers, which launches reuse. The process keeps at most one idle
// pool. TakeFiberPool returns the idle pool, or a new one if there is none.
// GiveFiberPool frees the idle pool and keeps the given one (or none, if null)
// in its place.
class FiberPool;
FiberPool* TakeFiberPool();
void GiveFiberPool(FiberPool* pool);

// Runs the launch on the calling thread, and returns when all its CTAs have
// ended.
void RunLaunch(FiberPool& pool, const LaunchRequest& request);

}  // namespace kvasir::kernels::emulation
