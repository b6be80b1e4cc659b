// Tables of a kernel's source lines that launches fill in, and the request for
// one launch: the interface between emulator.cc and the runtime.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/guarded_memory.h"
#include "kernels/device/launcher.h"
#include "kernels/emulation/primitives.h"

namespace kvasir::kernels::emulation {

// Synchronizing lines of one kernel, in the order of their first passes.
struct SiteTable {
  static constexpr int kMost = 256;
  struct Entry {
    Site site;
    const char* kind;
    int64_t passes;
  };
  Entry entries[kMost];
  int count;
  // The site that is left out: its file's name without folders (null: no site
  // is left out), and its index, which is -1 until a thread has passed it.
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
  kAny,     // any of them, at random
  kByWarp,  // mostly a thread of the ready warp with the lowest rank, so that
            // one warp runs far ahead
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

// Stacks and fibers, reused from launch to launch. GiveFiberPool keeps one pool
// for the next TakeFiberPool and frees the one that it kept before; null only
// frees.
class FiberPool;
FiberPool* TakeFiberPool();
void GiveFiberPool(FiberPool* pool);

// Runs on the calling thread; returns when all CTAs have ended.
void RunLaunch(FiberPool& pool, const LaunchRequest& request);

}  // namespace kvasir::kernels::emulation
