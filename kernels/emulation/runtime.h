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
inline constexpr uint32_t kMaxSharedBytes = 227u << 10;  // sm_90
inline constexpr uint32_t kSharedAlignment = 128;

struct Cta;
struct Fiber;
struct Meet;

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
};
struct BulkCopy {
  char* to;
  const char* from;
  uint32_t bytes;
  char* barrier;
};

// A CUDA thread.
struct Fiber {
  void* stack_pointer;
  char* stack;  // lowest address, above a page that cannot be touched
  void* tsan;
  Cta* cta;
  Place place;
  const Meet* waits_for;  // null: it is ready, runs or has ended
  bool ended;
  const char* doing;  // the primitive, and where it was called
  Site site;
  RawArray<PendingCopy> copies;  // in the order in which they were asked for
  size_t landed;                 // of them
  int groups;                    // committed
  Tag released;                  // by its last fence
  RawArray<Tag> read;            // by atomics since its last fence
  uint32_t given[8];             // to a collective
  uint32_t got[4];
};

// Threads that wait for each other.
struct Meet {
  uint32_t mask;  // of lanes; of a CTA's barriers: unused
  uint32_t arrived;
  uint32_t expected;
  uint32_t generation;
  const char* doing;
  Site site;
  uint64_t clocks[2];  // addresses of clocks, by generation
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
  static constexpr int kMasks = 8;
  Meet meets[kMasks];
  RawArray<OpenRequests> open;  // by access site
};

struct Cta {
  uint64_t index;  // in the grid
  uint32_t threads;
  uint32_t live;
  Fiber** fibers;
  Warp* warps;
  Meet barriers[16];
  char* shared;      // the first of shared_bytes
  char* shared_map;  // with pages before and behind that cannot be touched
  size_t shared_map_bytes;
  uint32_t shared_bytes;
  uint64_t start_clock;  // its address
};

struct Launch {
  const KernelLaunch* kernel;
  SiteTable* sites;
  AccessTable* accesses;  // null: not counted
  const GuardedMemory::Range* ranges;
  size_t num_ranges;
  bool any_memory;
  size_t last_range;

  uint64_t random;
  void* main_stack_pointer;
  void* main_tsan;
  Cta* ctas;
  uint32_t num_ctas;  // resident
  uint64_t next_cta, all_ctas;
  Cta* ended_cta;
  RawArray<Fiber*> ready;
  RawArray<BulkCopy> bulk;
  int64_t polls;  // since something else happened
  static constexpr size_t kLocationChunk = 512;
  RawArray<Location*> location_chunks;
  RawArray<Location*> locations;  // a hash table of them, half empty
  size_t num_locations;
  static constexpr size_t kMostClocks = size_t{1} << 20;
  char* clocks;  // addresses for fresh clocks
  size_t num_clocks;
};

// The launch and the thread that run on this thread of the host.
extern constinit thread_local Launch* current_launch;
extern constinit thread_local Fiber* current_fiber;

// --- scheduler.cc
uint64_t Random();
// Says what the current thread is about to do.
void Enter(const char* doing, Site site);
// Lets another thread go on, any; and this one later.
void Yield();
// The same, of a thread that looks for a change: when none comes any more the
// launch ends by a report.
void Poll();
// Something changed.
void Progress();
// Ends the process; `what` as printf's.
[[noreturn]] void Fault(const char* what, ...)
    __attribute__((format(printf, 1, 2)));
// Whether the site of the current thread's primitive is left out.
bool LeftOut();
// Comes to `meet` for `expected` threads; the last one calls finish(context).
struct Arrival {
  uint32_t expected;
  bool waits;
  bool orders;     // memory
  bool same_site;  // all come to the same call
  void (*finish)(void* context);
  void* context;
};
void Arrive(Meet& meet, const Arrival& arrival);
void LandBulk();
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
void CheckGlobalRange(const void* address, size_t bytes);
void CheckSharedRange(const void* address, size_t bytes);
void CheckAligned(const void* address, size_t bytes);
void CountAccess(const void* address, size_t bytes, bool shared, bool stores);

// Byte by byte, without calls that ThreadSanitizer hears.
inline void CopyBytes(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    static_cast<volatile char*>(to)[i] = from[i];
  }
}
inline void PoisonBytes(char* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    static_cast<volatile char*>(to)[i] = '\xff';
  }
}

}  // namespace kvasir::kernels::emulation
