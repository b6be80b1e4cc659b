// The state of an emulated launch, and the functions that the source files of
// the emulator's runtime share. Only files that are compiled without sanitizer
// instrumentation may include this header. While a kernel runs, the runtime
// must not use an allocator, memcpy or a standard container; raw_array.h says
// why.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/guarded_memory.h"
#include "kernels/device/launcher.h"
#include "kernels/emulation/primitives.h"
#include "kernels/emulation/raw_array.h"
#include "kernels/emulation/tables.h"
#include "kernels/emulation/tsan.h"

namespace kvasir::kernels::emulation {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kMaxThreads = 1024;
inline constexpr uint32_t kMaxWarps = kMaxThreads / kLanes;
inline constexpr uint32_t kSharedAlignment = 128;

struct CtaBarrier;
struct Cta;
struct Fiber;
struct Meet;
struct Warp;

// A snapshot of everything that a thread had done when it executed a fence or a
// release, or arrived at a barrier. The snapshot is a vector clock that
// ThreadSanitizer stores under the address `clock`.
struct Tag {
  void* clock;  // null: there is no snapshot
  bool gpu;     // true: the fence's scope is the GPU; false: only `cta`
  uint64_t cta;
  const Fiber* by;
};

// An address that atomics access. An atomic that reads it may acquire the
// clocks of its tags.
struct Location {
  void* address;
  size_t bytes;  // size of the last access
  // The CTA that owns the shared memory. For global memory: the first CTA that
  // accessed the address.
  uint64_t cta;
  bool cta_scoped;  // whether an atomic of CTA scope accessed the address
  RawArray<Tag> tags;
  // Only for a copy barrier: the addresses of these elements are keys of
  // ThreadSanitizer clocks, one for each parity of a phase.
  uint64_t phases[2];
};

struct PendingCopy {
  char* to;
  const char* from;
  uint32_t bytes;
  int group;
  Site site;
};
struct BulkCopy {
  char* to;
  const char* from;
  uint32_t bytes;
  char* barrier;
};

// An address that a thread polled, and the value that it read.
struct Look {
  const void* at;
  uint64_t value;
};

// A CUDA thread, which runs as a fiber. The members that a switch between
// fibers uses come first, so that they are in one or two cache lines.
struct alignas(64) Fiber {
  void* stack_pointer;
  Warp* warp;
  Cta* cta;
  const Meet* waits_for;  // null if the thread does not wait
  const char* doing;      // the name of the current primitive
  Site site;
  uint32_t lane;
  bool ended;
  Place place;
  uint32_t given[8];  // operands of a collective operation
  uint32_t got[4];    // results of the collective operation
  static constexpr uint32_t kLooks = 4;
  // the latest kLooks polls of different addresses or values
  Look looks[kLooks];
  uint32_t num_looks;
  char* stack;  // lowest address, just above a guard page
  void* tsan;
  RawArray<PendingCopy> copies;  // in the order in which they were requested
  size_t landed;                 // number of copies whose bytes have arrived
  int groups;                    // number of committed groups of copies
  Tag released;                  // snapshot at the thread's last fence
  // snapshots that the thread's atomics have read since that fence
  RawArray<Tag> read;
};

// A point at which threads wait for each other.
struct Meet {
  uint32_t mask;   // lanes that meet; not used by barriers of a CTA
  uint32_t lanes;  // number of lanes in the mask
  uint32_t arrived;
  uint32_t expected;
  uint32_t generation;
  uint32_t waiting;  // mask of the warp's lanes that wait
  const char* doing;
  Site site;
  // The addresses of these elements are keys of ThreadSanitizer clocks. Meeting
  // number `generation` uses element generation % 2.
  uint64_t clocks[2];
};
struct CtaBarrier {
  Meet meet;
  // For each warp, the mask of the lanes that wait.
  uint32_t waiting[kMaxWarps];
  // the lanes that have arrived; used only by named barriers
  uint32_t came[kMaxWarps];
};

// The accesses of a warp's lanes that form one memory request.
struct Request {
  uint32_t mask;
  uint32_t bytes;  // bytes that each lane accesses
  uint64_t addresses[kLanes];
};
struct OpenRequests {
  RawArray<Request> requests;  // request n has the n-th access of every lane
  uint32_t count[kLanes];
};

struct Warp {
  Fiber* lanes;
  uint32_t ready;  // mask of lanes that can run
  uint32_t rank;   // the warp's rank in the launch; 0 runs first
  static constexpr int kMasks = 8;
  Meet meets[kMasks];
  RawArray<OpenRequests> open;  // one element per access site
};

struct Cta {
  uint64_t index;  // the CTA's number in the grid
  uint32_t threads;
  uint32_t live;
  Fiber* fibers;
  Warp* warps;
  CtaBarrier barriers[16];  // SyncCta uses barrier 0
  char* shared;
  char* shared_map;  // includes a guard page on each side
  size_t shared_map_bytes;
  uint32_t shared_bytes;
  uint64_t start_clock;  // its address is the key of a ThreadSanitizer clock
};

// A 16-byte block of global memory, and which of its bytes a launch has stored
// to through primitives.
struct StoredBlock {
  static constexpr uint64_t kBytes = 16;
  uint64_t block;  // address of the block / kBytes
  // The number of the launch that stored. If it is not the current launch
  // (FiberPool::launches), the entry is free.
  uint32_t launch;
  uint32_t stored;  // one bit for each byte of the block
};

// Memory of the runtime that is kept from one launch to the next.
class FiberPool {
 public:
  RawArray<Fiber> fibers;
  RawArray<Cta> ctas;
  RawArray<Warp> warps;
  char* signal_stack;
  char* clocks;  // memory whose addresses FreshClock returns as keys
  RawArray<Location*> location_chunks;
  RawArray<Location*> locations;  // hash table, at most half full
  RawArray<StoredBlock> stored;   // hash table, at most half full
  // number of blocks that this launch has stored to
  size_t num_stored;
  uint32_t launches;
  // Memory for the arrays of the same names in Launch.
  RawArray<Fiber*> ready;
  RawArray<Warp*> by_rank;
  RawArray<uint64_t> ready_ranks;
  RawArray<BulkCopy> bulk;
};

struct Launch {
  FiberPool* pool;
  const KernelLaunch* kernel;
  SiteTable* sites;
  AccessTable* accesses;  // null: accesses are not counted
  const GuardedMemory::Range* ranges;
  size_t num_ranges;
  bool any_memory;
  // Two caches, indexed by the source line modulo kLines. They hold the index
  // of the memory range that the line accessed last, and the index of the
  // line's site.
  static constexpr size_t kLines = 64;
  size_t range_of_line[kLines];
  int site_of_line[kLines];

  ThreadOrder order;
  uint64_t random;
  void* main_stack_pointer;
  void* main_tsan;
  Cta* ctas;
  uint32_t num_ctas;   // number of CTAs that are resident at a time
  uint32_t num_warps;  // number of warps of the resident CTAs
  uint64_t next_cta, all_ctas;
  Cta* ended_cta;
  // For ThreadOrder::kAny: the threads that can run.
  RawArray<Fiber*> ready;
  // For ThreadOrder::kByWarp: by_rank has the warps, indexed by rank.
  // ready_ranks has a bit for each rank; it is set if the warp has lanes that
  // can run.
  RawArray<Warp*> by_rank;
  RawArray<uint64_t> ready_ranks;
  RawArray<BulkCopy> bulk;
  int64_t polls;  // number of polls since any thread made progress
  static constexpr size_t kLocationChunk = 512;
  size_t num_locations;
  static constexpr size_t kMostClocks = size_t{1} << 20;
  size_t num_clocks;
};

// The launch and the CUDA thread that run on this host thread.
extern KVASIR_EMULATION_TLS Launch* current_launch;
extern KVASIR_EMULATION_TLS Fiber* current_fiber;

// --- scheduler.cc
inline uint64_t Random() {  // xorshift64
  uint64_t& x = current_launch->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x >> 11;
}
inline uint32_t RandomBelow(size_t count) {
  return static_cast<uint32_t>(
      (Random() & 0xffffffffu) * static_cast<uint32_t>(count) >> 32);
}
// Records the primitive that the current thread is about to run, for reports.
inline void Enter(const char* doing, Site site) {
  current_fiber->doing = doing;
  current_fiber->site = site;
}
// Switches to any ready thread; the current thread stays ready.
void Yield();
// Yields because the current thread has read `value` at `at` and waits for
// another value. If all threads only poll and read the same values again, the
// process ends with a report of a deadlock.
void Poll(const void* at, uint64_t value);
// Records that a thread made progress, so that polls before this do not count
// as a deadlock.
inline void Progress() { current_launch->polls = 0; }
// Reports an error at the current thread's primitive and ends the process. The
// arguments are those of printf.
[[noreturn]] void Fault(const char* what, ...)
    __attribute__((format(printf, 1, 2)));
// Returns whether the current thread's primitive must do
// nothing (Emulator::LeaveOut).
bool LeftOut();
// Describes how a thread arrives at a Meet. When the last of `expected` threads
// arrives, it calls finish(context) and makes the waiting threads ready.
struct Arrival {
  uint32_t expected;
  bool waits;
  bool orders;     // the arrival orders memory accesses, like a barrier
  bool same_site;  // all threads must arrive at the same source line
  // the barrier to which the Meet belongs; null if the lanes of a warp meet
  CtaBarrier* barrier;
  void (*finish)(void* context);
  void* context;
};
void Arrive(Meet& meet, const Arrival& arrival);
void LandBulk();
// Gives the warps of a new CTA random ranks, which determine the order in which
// warps run. The CTA's fibers must exist, but none may be ready.
void PlaceWarps(Cta& cta);
// Makes `lanes` of the warp ready.
void MakeReady(Warp& warp, uint32_t lanes);
// Prepares a fiber to run the kernel from its beginning.
void StartFiber(Fiber& fiber, size_t stack_bytes);
// Runs fibers until a CTA ends (Launch::ended_cta).
void RunUntilACtaEnds();
const char* BaseName(const char* path);

// --- ordering.cc
void* FreshClock();
Location& LocationOf(const void* address);
bool InShared(const void* address);

// --- accesses.cc

// Adds the cost of a warp's open requests to the counts, and starts new
// requests.
void FlushRequests(Cta& cta, uint32_t warp);
// Describes the memory at an address whose access raised a signal. Writes the
// description to `text`, and returns `text`.
const char* DescribeAddress(const void* address, char* text, size_t bytes);
[[noreturn]] void FaultMisaligned(const void* address, size_t bytes);
[[noreturn]] void FaultOutOfShared(const void* address);
// Returns the index (in Launch::ranges) of the allocation that holds these
// bytes. Reports a fault if there is none.
size_t FindRange(const void* address, size_t bytes);
void CountIn(AccessTable& table, const void* address, size_t bytes, bool shared,
             bool stores);
inline bool Holds(const GuardedMemory::Range& range, const void* address,
                  size_t bytes) {
  const auto* const begin = static_cast<const char*>(address);
  return range.begin <= begin && begin + bytes <= range.end;
}
// `bytes` is a power of two.
inline void CheckAligned(const void* address, size_t bytes) {
  if ((reinterpret_cast<uint64_t>(address) & (bytes - 1)) != 0) {
    FaultMisaligned(address, bytes);
  }
}
inline void CheckSharedRange(const void* address, size_t bytes) {
  const Cta& cta = *current_fiber->cta;
  const auto* const at = static_cast<const char*>(address);
  if (at < cta.shared || at + bytes > cta.shared + cta.shared_bytes) {
    FaultOutOfShared(address);
  }
}
inline void CheckGlobalRange(const void* address, size_t bytes) {
  Launch& launch = *current_launch;
  if (launch.any_memory) return;
  size_t& last =
      launch.range_of_line[static_cast<size_t>(current_fiber->site.line) %
                           Launch::kLines];
  if (last < launch.num_ranges && Holds(launch.ranges[last], address, bytes)) {
    return;
  }
  last = FindRange(address, bytes);
}
inline void CountAccess(const void* address, size_t bytes, bool shared,
                        bool stores) {
  AccessTable* const table = current_launch->accesses;
  if (table != nullptr) CountIn(*table, address, bytes, shared, stores);
}
// Records that the launch stored to these bytes, because LoadOnce must not load
// them. `bytes` is at most 16, and `address` is a multiple of `bytes`.
void NoteStore(const void* address, size_t bytes);

// Copies bytes without memcpy, which ThreadSanitizer would intercept.
inline void CopyBytes(char* to, const char* from, size_t bytes) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}
inline void FillBytes(char* to, char value, size_t bytes) {
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
}
// Fills memory with poison. Copies of 4, 8 and 16 bytes are frequent, so these
// sizes have a faster path.
inline void PoisonBytes(char* to, size_t bytes) {
  constexpr uint32_t kPoison = 0xffffffffu;
  if (bytes > 16 || bytes % 4 != 0) return FillBytes(to, '\xff', bytes);
  for (size_t i = 0; i < bytes; i += 4) {
    __builtin_memcpy(to + i, &kPoison, sizeof(kPoison));
  }
}
inline void CopyPiece(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 4) {
    uint32_t word;
    __builtin_memcpy(&word, from + i, sizeof(word));
    __builtin_memcpy(to + i, &word, sizeof(word));
  }
}

}  // namespace kvasir::kernels::emulation
