// Runs one launch, from its first CTA to its last.
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = size_t{128} << 10;
constexpr size_t kSignalStackBytes = size_t{64} << 10;
constexpr char kCanary = '\xa5';

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Maps pages with mmap(), which ThreadSanitizer intercepts, so that
// ThreadSanitizer forgets earlier accesses to these addresses.
char* Map(void* at, size_t bytes, int protection) {
  void* const data = ::mmap(
      at, bytes, protection,
      MAP_PRIVATE | MAP_ANONYMOUS | (at != nullptr ? MAP_FIXED : 0), -1, 0);
  if (data == MAP_FAILED) {
    std::perror("emulation: mmap");
    std::abort();
  }
  return static_cast<char*>(data);
}

// If all stacks began at the same offset in their pages, their most used parts
// would compete for the same cache sets. Therefore each stack begins a little
// deeper than the previous one.
constexpr size_t kStackShift = 320;
constexpr size_t kMostStackShift = 4096;

void MakeFiber(Fiber& fiber) {
  char* const map = Map(nullptr, kPageBytes + kStackBytes, PROT_NONE);
  fiber.stack = Map(map + kPageBytes, kStackBytes, PROT_READ | PROT_WRITE);
  fiber.tsan = tsan::CreateFiber();
}

void FreeFiber(Fiber& fiber) {
  tsan::DestroyFiber(fiber.tsan);
  ::munmap(fiber.stack - kPageBytes, kPageBytes + kStackBytes);
  fiber.copies.Free();
  fiber.read.Free();
}

// A SIGSEGV handler. Its report of a wrong address names the kernel and the
// indices of the thread that accessed it.
struct sigaction previous_action;

void OnBadAddress(int, siginfo_t* info, void*) {
  if (current_launch == nullptr) {
    // The fault is not in a kernel. After the previous handler is restored, the
    // access is retried and reaches that handler.
    ::sigaction(SIGSEGV, &previous_action, nullptr);
    return;
  }
  char text[160];
  Fault("%s", DescribeAddress(info->si_addr, text, sizeof(text)));
}

void CatchBadAddresses() {
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = &OnBadAddress;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return ::sigaction(SIGSEGV, &action, &previous_action) == 0;
  }();
  (void)once;
}

// Maps a CTA's shared memory so that it ends at a guard page, except for a few
// bytes of padding for its alignment.
void MapShared(Cta& cta, uint32_t bytes) {
  const size_t data = AlignUp(bytes, kPageBytes);
  if (cta.shared_map_bytes != data + 2 * kPageBytes) {
    if (cta.shared_map != nullptr) {
      ::munmap(cta.shared_map, cta.shared_map_bytes);
    }
    cta.shared_map_bytes = data + 2 * kPageBytes;
    cta.shared_map = Map(nullptr, cta.shared_map_bytes, PROT_NONE);
    if (data > 0) {
      Map(cta.shared_map + kPageBytes, data, PROT_READ | PROT_WRITE);
    }
  }
  cta.shared_bytes = bytes;
  cta.shared =
      cta.shared_map + kPageBytes + data - AlignUp(bytes, kSharedAlignment);
}

void PoisonShared(Cta& cta) {
  char* const begin = cta.shared_map + kPageBytes;
  char* const end = cta.shared_map + cta.shared_map_bytes - kPageBytes;
  if (begin == end) return;
  // Maps fresh pages, so that ThreadSanitizer does not compare this CTA's
  // accesses with those of an earlier CTA in the same memory.
  if (tsan::kOn) {
    Map(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE);
  }
  char* const behind = cta.shared + cta.shared_bytes;
  FillBytes(begin, kCanary, static_cast<size_t>(cta.shared - begin));
  PoisonBytes(cta.shared, cta.shared_bytes);
  FillBytes(behind, kCanary, static_cast<size_t>(end - behind));
}

void CheckCanaries(const Cta& cta, const char* begin, const char* end) {
  for (const char* at = begin; at < end; ++at) {
    if (*at != kCanary) {
      Fault("out of bounds: byte %lld of %u bytes of shared memory was written",
            static_cast<long long>(at - cta.shared), cta.shared_bytes);
    }
  }
}

void StartCta(Launch& launch, Cta& cta) {
  PoisonShared(cta);
  const KernelLaunch& kernel = *launch.kernel;
  cta.index = launch.next_cta++;
  cta.live = cta.threads;
  tsan::Release(&cta.start_clock);
  PlaceWarps(cta);
  const Place place = {0,
                       cta.threads,
                       static_cast<uint32_t>(cta.index % kernel.grid_x),
                       static_cast<uint32_t>(cta.index / kernel.grid_x),
                       kernel.grid_x,
                       kernel.grid_y,
                       cta.shared};
  for (uint32_t w = 0; w < cta.threads / kLanes; ++w) {
    Warp& warp = cta.warps[w];
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      Fiber& fiber = warp.lanes[lane];
      fiber.warp = &warp;
      fiber.cta = &cta;
      fiber.waits_for = nullptr;
      fiber.doing = nullptr;
      fiber.lane = lane;
      fiber.ended = false;
      fiber.place = place;
      fiber.place.thread = w * kLanes + lane;
      for (Look& look : fiber.looks) look = {nullptr, 0};
      fiber.num_looks = 0;
      fiber.copies.Clear();
      fiber.landed = 0;
      fiber.groups = 0;
      fiber.released = {};
      fiber.read.Clear();
      StartFiber(fiber, kStackBytes - lane * kStackShift % kMostStackShift);
    }
    MakeReady(warp, ~0u);
  }
}

void EndCta(Launch& launch, Cta& cta) {
  // so that fault reports name a thread of this CTA
  current_fiber = &cta.fibers[0];
  for (uint32_t w = 0; w < cta.threads / kLanes; ++w) FlushRequests(cta, w);
  CheckCanaries(cta, cta.shared_map + kPageBytes, cta.shared);
  CheckCanaries(cta, cta.shared + cta.shared_bytes,
                cta.shared_map + cta.shared_map_bytes - kPageBytes);
  for (const CtaBarrier& barrier : cta.barriers) {
    const Meet& meet = barrier.meet;
    if (meet.arrived > 0) {
      Fault(
          "the CTA ended when only %u of %u threads had arrived at %s (%s:%d)",
          meet.arrived, meet.expected, meet.doing, BaseName(meet.site.file),
          meet.site.line);
    }
  }
  for (size_t i = 0; i < launch.bulk.size(); ++i) {
    const char* const to = launch.bulk[i].to;
    if (to >= cta.shared && to < cta.shared + cta.shared_bytes) {
      Fault(
          "the CTA ended before a bulk copy to its shared memory had arrived");
    }
  }
  current_fiber = nullptr;
}

void CheckShape(const KernelLaunch& kernel, const LaunchRequest& request) {
  const auto refuse = [&](const char* what, uint64_t have, uint64_t most) {
    std::fprintf(stderr,
                 "emulated kernel %s: %s: %llu, but must be at most %llu\n",
                 kernel.name, what, static_cast<unsigned long long>(have),
                 static_cast<unsigned long long>(most));
    std::abort();
  };
  if (kernel.threads % kLanes != 0 || kernel.threads == 0) {
    std::fprintf(stderr,
                 "emulated kernel %s: threads of a CTA: %u, but must be a "
                 "multiple of 32, above 0\n",
                 kernel.name, kernel.threads);
    std::abort();
  }
  if (kernel.threads > kMaxThreads) {
    refuse("threads of a CTA", kernel.threads, kMaxThreads);
  }
  if (kernel.shared_bytes > request.shared_bytes) {
    refuse("bytes of shared memory", kernel.shared_bytes, request.shared_bytes);
  }
  if (kernel.grid_x > 0x7fffffffu) {
    refuse("CTAs in x", kernel.grid_x, 0x7fffffffu);
  }
  if (kernel.grid_y > 0xffffu) refuse("CTAs in y", kernel.grid_y, 0xffffu);
  const uint64_t all = uint64_t{kernel.grid_x} * kernel.grid_y;
  if (kernel.ctas_together && all > request.multiprocessors) {
    refuse("CTAs that wait for each other", all, request.multiprocessors);
  }
}

}  // namespace

namespace {

FiberPool* MakeFiberPool() {
  auto* const pool = new (MapPages(sizeof(FiberPool))) FiberPool();
  pool->signal_stack = Map(nullptr, kSignalStackBytes, PROT_READ | PROT_WRITE);
  pool->clocks = static_cast<char*>(MapPages(8 * Launch::kMostClocks));
  pool->locations.Resize(1024);
  return pool;
}

void FreeFiberPool(FiberPool* pool) {
  for (size_t i = 0; i < pool->fibers.size(); ++i) FreeFiber(pool->fibers[i]);
  pool->fibers.Free();
  for (size_t i = 0; i < pool->ctas.size(); ++i) {
    ::munmap(pool->ctas[i].shared_map, pool->ctas[i].shared_map_bytes);
  }
  pool->ctas.Free();
  for (size_t w = 0; w < pool->warps.size(); ++w) {
    RawArray<OpenRequests>& open = pool->warps[w].open;
    for (size_t i = 0; i < open.size(); ++i) open[i].requests.Free();
    open.Free();
  }
  pool->warps.Free();
  ::munmap(pool->signal_stack, kSignalStackBytes);
  UnmapPages(pool->clocks, 8 * Launch::kMostClocks);
  for (size_t i = 0; i < pool->location_chunks.size(); ++i) {
    Location* const chunk = pool->location_chunks[i];
    for (size_t l = 0; l < Launch::kLocationChunk; ++l) chunk[l].tags.Free();
    UnmapPages(chunk, Launch::kLocationChunk * sizeof(Location));
  }
  pool->location_chunks.Free();
  pool->locations.Free();
  pool->stored.Free();
  pool->ready.Free();
  pool->by_rank.Free();
  pool->ready_ranks.Free();
  pool->bulk.Free();
  UnmapPages(pool, sizeof(FiberPool));
}

// The idle pool: the one that GiveFiberPool got last. Null if TakeFiberPool has
// returned it since.
constinit std::atomic<FiberPool*> idle_pool = nullptr;

template <typename T>
void AtLeast(RawArray<T>& array, size_t size) {
  if (array.size() < size) array.Resize(size);
}

}  // namespace

FiberPool* TakeFiberPool() {
  FiberPool* const pool = idle_pool.exchange(nullptr);
  return pool != nullptr ? pool : MakeFiberPool();
}

void GiveFiberPool(FiberPool* pool) {
  FiberPool* const before = idle_pool.exchange(pool);
  if (before != nullptr) FreeFiberPool(before);
}

void RunLaunch(FiberPool& pool, const LaunchRequest& request) {
  const KernelLaunch& kernel = *request.kernel;
  CheckShape(kernel, request);
  CatchBadAddresses();
  stack_t signal_stack = {};
  signal_stack.ss_sp = pool.signal_stack;
  signal_stack.ss_size = kSignalStackBytes;
  stack_t previous_stack = {};
  ::sigaltstack(&signal_stack, &previous_stack);

  Launch launch = {};
  launch.pool = &pool;
  launch.kernel = &kernel;
  launch.sites = request.sites;
  launch.accesses = request.accesses;
  launch.ranges = request.ranges;
  launch.num_ranges = request.num_ranges;
  launch.any_memory = request.any_memory;
  launch.order = request.order;
  launch.random = request.random;
  launch.main_tsan = tsan::CurrentFiber();
  launch.all_ctas = uint64_t{kernel.grid_x} * kernel.grid_y;
  launch.num_ctas = static_cast<uint32_t>(
      launch.all_ctas < request.multiprocessors ? launch.all_ctas
                                                : request.multiprocessors);
  const uint32_t cta_warps = kernel.threads / kLanes;
  launch.num_warps = launch.num_ctas * cta_warps;
  ++pool.launches;
  pool.num_stored = 0;
  AtLeast(pool.ctas, launch.num_ctas);
  AtLeast(pool.warps, launch.num_warps);
  const size_t num_fibers = size_t{launch.num_warps} * kLanes;
  const size_t had_fibers = pool.fibers.size();
  AtLeast(pool.fibers, num_fibers);
  for (size_t i = had_fibers; i < num_fibers; ++i) MakeFiber(pool.fibers[i]);
  launch.ctas = &pool.ctas[0];
  launch.ready.Swap(pool.ready);
  launch.by_rank.Swap(pool.by_rank);
  launch.ready_ranks.Swap(pool.ready_ranks);
  launch.bulk.Swap(pool.bulk);
  launch.by_rank.Resize(launch.num_warps);
  launch.ready_ranks.Resize(launch.num_warps / 64 + 1);
  for (uint32_t w = 0; w < launch.num_warps; ++w) {
    Warp& warp = pool.warps[w];
    warp.lanes = &pool.fibers[size_t{w} * kLanes];
    warp.ready = 0;
    warp.rank = w;
    launch.by_rank[w] = &warp;
  }
  current_launch = &launch;
  for (uint32_t c = 0; c < launch.num_ctas; ++c) {
    Cta& cta = launch.ctas[c];
    cta.threads = kernel.threads;
    cta.fibers = &pool.fibers[size_t{c} * kernel.threads];
    cta.warps = &pool.warps[size_t{c} * cta_warps];
    MapShared(cta, kernel.shared_bytes);
    StartCta(launch, cta);
  }
  for (uint64_t ended = 0; ended < launch.all_ctas; ++ended) {
    RunUntilACtaEnds();
    EndCta(launch, *launch.ended_cta);
    if (launch.next_cta < launch.all_ctas) {
      StartCta(launch, *launch.ended_cta);
    }
  }
  tsan::Acquire(&launch.ended_cta);
  current_launch = nullptr;

  if (launch.num_locations > 0) {
    FillBytes(reinterpret_cast<char*>(&pool.locations[0]), 0,
              pool.locations.size() * sizeof(Location*));
  }
  launch.ready.Swap(pool.ready);
  launch.by_rank.Swap(pool.by_rank);
  launch.ready_ranks.Swap(pool.ready_ranks);
  launch.bulk.Swap(pool.bulk);
  ::sigaltstack(&previous_stack, nullptr);
}

}  // namespace kvasir::kernels::emulation
