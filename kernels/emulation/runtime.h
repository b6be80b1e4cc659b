// The state of a launch, and what its parts call of each other. Only the files
// that are compiled without instrumentation include this: nothing here may use
// an allocator, memcpy or a container while a kernel runs (raw_array.h).
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

// What a thread had done when it fenced, released or arrived: a clock that
// ThreadSanitizer keeps under an address.
struct Tag {
  void* clock;  // null: none
  bool gpu;     // for all CTAs, or the fiber's own
  uint64_t cta;
  const Fiber* by;
};

// An atomic's address: which clocks those who read it may take over.
struct Location {
  void* address;
  size_t bytes;     // of its last access
  uint64_t cta;     // shared memory: whose; global: that of the first access
  bool cta_scoped;  // touched in that scope
  RawArray<Tag> tags;
  uint64_t phases[2];  // of a copy barrier: addresses of clocks
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

// What a thread found where it looked for a change.
struct Look {
  const void* at;
  uint64_t value;
};

// A CUDA thread. What a switch needs comes first: one or two cache lines.
struct alignas(64) Fiber {
  void* stack_pointer;
  Warp* warp;
  Cta* cta;
  const Meet* waits_for;  // null: it is ready, runs or has ended
  const char* doing;      // the primitive, and where it was called
  Site site;
  uint32_t lane;
  bool ended;
  Place place;
  uint32_t given[8];  // to a collective
  uint32_t got[4];
  static constexpr uint32_t kLooks = 4;
  Look looks[kLooks];  // the last that were not alike
  uint32_t num_looks;
  char* stack;  // lowest address, above a page that cannot be touched
  void* tsan;
  RawArray<PendingCopy> copies;  // in the order in which they were asked for
  size_t landed;                 // of them
  int groups;                    // committed
  Tag released;                  // by its last fence
  RawArray<Tag> read;            // by atomics since its last fence
};

// Threads that wait for each other.
struct Meet {
  uint32_t mask;   // of lanes; of a CTA's barriers: unused
  uint32_t lanes;  // of those
  uint32_t arrived;
  uint32_t expected;
  uint32_t generation;
  uint32_t waiting;  // lanes of a warp
  const char* doing;
  Site site;
  uint64_t clocks[2];  // addresses of clocks, by generation
};
// Of a CTA.
struct CtaBarrier {
  Meet meet;
  // Lanes of each warp.
  uint32_t waiting[kMaxWarps];
  uint32_t came[kMaxWarps];  // named barriers
};

// Lanes' accesses that are one request.
struct Request {
  uint32_t mask;
  uint32_t bytes;  // of a lane
  uint64_t addresses[kLanes];
};
struct OpenRequests {
  RawArray<Request> requests;  // the n-th is that of each lane's n-th access
  uint32_t count[kLanes];
};

struct Warp {
  Fiber* lanes;
  uint32_t ready;  // lanes that could go on
  uint32_t rank;   // in the launch; 0 goes first
  static constexpr int kMasks = 8;
  Meet meets[kMasks];
  RawArray<OpenRequests> open;  // by access site
};

struct Cta {
  uint64_t index;  // in the grid
  uint32_t threads;
  uint32_t live;
  Fiber* fibers;
  Warp* warps;
  CtaBarrier barriers[16];  // the first is SyncCta's
  char* shared;             // the first of shared_bytes
  char* shared_map;  // with pages before and behind that cannot be touched
  size_t shared_map_bytes;
  uint32_t shared_bytes;
  uint64_t start_clock;  // its address
};

// Bytes of global memory that a launch has stored to through primitives.
struct StoredBlock {
  static constexpr uint64_t kBytes = 16;
  uint64_t block;   // its address / kBytes
  uint32_t launch;  // that of FiberPool::launches; another: the entry is free
  uint32_t stored;  // a bit for each byte
};

// What launches leave to the next one.
class FiberPool {
 public:
  RawArray<Fiber> fibers;
  RawArray<Cta> ctas;
  RawArray<Warp> warps;
  char* signal_stack;
  char* clocks;  // addresses for fresh clocks
  RawArray<Location*> location_chunks;
  RawArray<Location*> locations;  // a hash table of them, half empty
  RawArray<StoredBlock> stored;   // likewise
  size_t num_stored;              // by this launch
  uint32_t launches;
  // Memory for the launch's arrays of these names.
  RawArray<Fiber*> ready;
  RawArray<Warp*> by_rank;
  RawArray<uint64_t> ready_ranks;
  RawArray<BulkCopy> bulk;
};

struct Launch {
  FiberPool* pool;
  const KernelLaunch* kernel;
  SiteTable* sites;
  AccessTable* accesses;  // null: not counted
  const GuardedMemory::Range* ranges;
  size_t num_ranges;
  bool any_memory;
  // Where lines (by their number) found their memory last.
  static constexpr size_t kLines = 64;
  size_t range_of_line[kLines];
  int site_of_line[kLines];

  ThreadOrder order;
  uint64_t random;
  void* main_stack_pointer;
  void* main_tsan;
  Cta* ctas;
  uint32_t num_ctas;   // resident
  uint32_t num_warps;  // of those
  uint64_t next_cta, all_ctas;
  Cta* ended_cta;
  // Threads that could go on, of kAny.
  RawArray<Fiber*> ready;
  // Else: warps by rank, and a bit for each rank whose warp has any.
  RawArray<Warp*> by_rank;
  RawArray<uint64_t> ready_ranks;
  RawArray<BulkCopy> bulk;
  int64_t polls;  // since something else happened
  static constexpr size_t kLocationChunk = 512;
  size_t num_locations;
  static constexpr size_t kMostClocks = size_t{1} << 20;
  size_t num_clocks;
};

// The launch and the thread that run on this thread of the host.
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
// Says what the current thread is about to do.
inline void Enter(const char* doing, Site site) {
  current_fiber->doing = doing;
  current_fiber->site = site;
}
// Lets another thread go on, any; and this one later.
void Yield();
// The same, of a thread that finds `value` where it looks for a change. When
// all that is found is what was found there before the launch ends by a report.
void Poll(const void* at, uint64_t value);
// Something changed.
inline void Progress() { current_launch->polls = 0; }
// Ends the process; `what` as printf's.
[[noreturn]] void Fault(const char* what, ...)
    __attribute__((format(printf, 1, 2)));
// Whether the site of the current thread's primitive is left out.
bool LeftOut();
// Comes to `meet` for `expected` threads; the last one calls finish(context).
struct Arrival {
  uint32_t expected;
  bool waits;
  bool orders;          // memory
  bool same_site;       // all come to the same call
  CtaBarrier* barrier;  // whose `meet` is; null: lanes of one warp meet
  void (*finish)(void* context);
  void* context;
};
void Arrive(Meet& meet, const Arrival& arrival);
void LandBulk();
// A CTA's threads are there, its warps' places among the others are not yet
// chosen.
void PlaceWarps(Cta& cta);
// Lanes of the warp that are not ready become so.
void MakeReady(Warp& warp, uint32_t lanes);
// Prepares a fiber to begin the kernel.
void StartFiber(Fiber& fiber, size_t stack_bytes);
// By the launch's own thread.
void RunUntilACtaEnds();
const char* BaseName(const char* path);

// --- ordering.cc
void* FreshClock();
Location& LocationOf(const void* address);
bool InShared(const void* address);

// --- accesses.cc
// Counts the requests of a warp that are open.
void FlushRequests(Cta& cta, uint32_t warp);
// Finds whose address it is, for reports of signals.
const char* DescribeAddress(const void* address, char* text, size_t bytes);
[[noreturn]] void FaultMisaligned(const void* address, size_t bytes);
[[noreturn]] void FaultOutOfShared(const void* address);
// The index of the range that holds the bytes, or a Fault.
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
// Remembers a store for LoadOnce; at most 16 bytes, aligned to their number.
void NoteStore(const void* address, size_t bytes);

// Without calls that ThreadSanitizer hears.
inline void CopyBytes(char* to, const char* from, size_t bytes) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}
inline void FillBytes(char* to, char value, size_t bytes) {
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
}
// Copies of 4, 8 and 16 bytes are pieces: many, and small.
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
