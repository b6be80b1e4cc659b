// One launch from its first CTA to its last.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {

class FiberPool {
 public:
  RawArray<Fiber*> fibers;
};

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = size_t{128} << 10;
constexpr size_t kSignalStackBytes = size_t{64} << 10;
constexpr char kCanary = '\xa5';

size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Seen by ThreadSanitizer, which forgets what it knew of these addresses.
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

Fiber* MakeFiber() {
  auto* const fiber = static_cast<Fiber*>(MapPages(sizeof(Fiber)));
  char* const map = Map(nullptr, kPageBytes + kStackBytes, PROT_NONE);
  fiber->stack = Map(map + kPageBytes, kStackBytes, PROT_READ | PROT_WRITE);
  fiber->tsan = tsan::CreateFiber();
  return fiber;
}

void FreeFiber(Fiber* fiber) {
  tsan::DestroyFiber(fiber->tsan);
  ::munmap(fiber->stack - kPageBytes, kPageBytes + kStackBytes);
  fiber->copies.Free();
  fiber->read.Free();
  UnmapPages(fiber, sizeof(Fiber));
}

// A wrong address ends the process with the kernel's place.
struct sigaction previous_action;

void OnBadAddress(int, siginfo_t* info, void*) {
  if (current_launch == nullptr) {
    // Not ours: the access is tried again, and meets who was there before.
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

// Dynamic shared memory ends (but for its alignment) where a page does that
// cannot be touched.
void MapShared(Cta& cta, uint32_t bytes) {
  const size_t data = AlignUp(bytes, kPageBytes);
  cta.shared_map_bytes = data + 2 * kPageBytes;
  cta.shared_map = Map(nullptr, cta.shared_map_bytes, PROT_NONE);
  cta.shared_bytes = bytes;
  cta.shared =
      cta.shared_map + kPageBytes + data - AlignUp(bytes, kSharedAlignment);
}

void ForCanaries(const Cta& cta, void (*visit)(const Cta&, char*)) {
  char* const begin = cta.shared_map + kPageBytes;
  char* const end = cta.shared_map + cta.shared_map_bytes - kPageBytes;
  for (char* at = begin; at < cta.shared; ++at) visit(cta, at);
  for (char* at = cta.shared + cta.shared_bytes; at < end; ++at) {
    visit(cta, at);
  }
}

void PoisonShared(Cta& cta) {
  const size_t data = cta.shared_map_bytes - 2 * kPageBytes;
  if (data == 0) return;
  // New pages: an earlier CTA's accesses are none to this one.
  Map(cta.shared_map + kPageBytes, data, PROT_READ | PROT_WRITE);
  PoisonBytes(cta.shared, cta.shared_bytes);
  ForCanaries(cta, [](const Cta&, char* at) {
    *static_cast<volatile char*>(at) = kCanary;
  });
}

void StartCta(Launch& launch, Cta& cta) {
  PoisonShared(cta);
  const KernelLaunch& kernel = *launch.kernel;
  cta.index = launch.next_cta++;
  cta.live = cta.threads;
  tsan::Release(&cta.start_clock);
  for (uint32_t t = 0; t < cta.threads; ++t) {
    Fiber& fiber = *cta.fibers[t];
    fiber.cta = &cta;
    fiber.place = {t,
                   cta.threads,
                   static_cast<uint32_t>(cta.index % kernel.grid_x),
                   static_cast<uint32_t>(cta.index / kernel.grid_x),
                   kernel.grid_x,
                   kernel.grid_y};
    fiber.waits_for = nullptr;
    fiber.ended = false;
    fiber.doing = nullptr;
    fiber.copies.Clear();
    fiber.landed = 0;
    fiber.groups = 0;
    fiber.released = {};
    fiber.read.Clear();
    StartFiber(fiber, kStackBytes);
    launch.ready.Push(&fiber);
  }
}

void EndCta(Launch& launch, Cta& cta) {
  current_fiber = cta.fibers[0];  // for reports
  for (uint32_t w = 0; w < cta.threads / kLanes; ++w) FlushRequests(cta, w);
  ForCanaries(cta, [](const Cta& of, char* at) {
    if (*at != kCanary) {
      Fault("out of bounds: byte %lld of %u of shared memory was written",
            static_cast<long long>(at - of.shared), of.shared_bytes);
    }
  });
  for (Meet& meet : cta.barriers) {
    if (meet.arrived > 0) {
      Fault("the CTA ended with %u threads of %u at %s (%s:%d)", meet.arrived,
            meet.expected, meet.doing, BaseName(meet.site.file),
            meet.site.line);
    }
  }
  for (size_t i = 0; i < launch.bulk.size(); ++i) {
    const char* const to = launch.bulk[i].to;
    if (to >= cta.shared && to < cta.shared + cta.shared_bytes) {
      Fault("the CTA ended while a bulk copy was under way");
    }
  }
  current_fiber = nullptr;
}

void CheckShape(const KernelLaunch& kernel, const LaunchRequest& request) {
  const auto refuse = [&](const char* what, uint64_t have, uint64_t most) {
    std::fprintf(stderr, "emulated kernel %s: %s: %llu, of at most %llu\n",
                 kernel.name, what, static_cast<unsigned long long>(have),
                 static_cast<unsigned long long>(most));
    std::abort();
  };
  if (kernel.threads % kLanes != 0 || kernel.threads == 0) {
    refuse("threads of a CTA, in whole warps", kernel.threads, kMaxThreads);
  }
  if (kernel.threads > kMaxThreads) {
    refuse("threads of a CTA", kernel.threads, kMaxThreads);
  }
  if (kernel.shared_bytes > kMaxSharedBytes) {
    refuse("bytes of shared memory", kernel.shared_bytes, kMaxSharedBytes);
  }
  if (kernel.grid_x > 0x7fffffffu) refuse("CTAs", kernel.grid_x, 0x7fffffffu);
  if (kernel.grid_y > 0xffffu) refuse("CTAs in y", kernel.grid_y, 0xffffu);
  const uint64_t all = uint64_t{kernel.grid_x} * kernel.grid_y;
  if (kernel.ctas_together && all > request.multiprocessors) {
    refuse("CTAs that wait for each other", all, request.multiprocessors);
  }
}

}  // namespace

FiberPool* MakeFiberPool() {
  return new (MapPages(sizeof(FiberPool))) FiberPool();
}

void FreeFiberPool(FiberPool* pool) {
  for (size_t i = 0; i < pool->fibers.size(); ++i) FreeFiber(pool->fibers[i]);
  pool->fibers.Free();
  UnmapPages(pool, sizeof(FiberPool));
}

void RunLaunch(FiberPool& pool, const LaunchRequest& request) {
  const KernelLaunch& kernel = *request.kernel;
  CheckShape(kernel, request);
  CatchBadAddresses();
  stack_t signal_stack = {};
  signal_stack.ss_sp = Map(nullptr, kSignalStackBytes, PROT_READ | PROT_WRITE);
  signal_stack.ss_size = kSignalStackBytes;
  stack_t previous_stack = {};
  ::sigaltstack(&signal_stack, &previous_stack);

  Launch launch = {};
  launch.kernel = &kernel;
  launch.sites = request.sites;
  launch.accesses = request.accesses;
  launch.ranges = request.ranges;
  launch.num_ranges = request.num_ranges;
  launch.any_memory = request.any_memory;
  launch.random = request.random;
  launch.main_tsan = tsan::CurrentFiber();
  launch.all_ctas = uint64_t{kernel.grid_x} * kernel.grid_y;
  launch.num_ctas = static_cast<uint32_t>(
      launch.all_ctas < request.multiprocessors ? launch.all_ctas
                                                : request.multiprocessors);
  launch.locations.Resize(1024);
  launch.clocks = static_cast<char*>(MapPages(8 * Launch::kMostClocks));
  const uint32_t num_warps = kernel.threads / kLanes;
  const size_t num_fibers = size_t{launch.num_ctas} * kernel.threads;
  const size_t all_warps = size_t{launch.num_ctas} * num_warps;
  while (pool.fibers.size() < num_fibers) pool.fibers.Push(MakeFiber());
  launch.ctas = static_cast<Cta*>(MapPages(launch.num_ctas * sizeof(Cta)));
  auto* const warps = static_cast<Warp*>(MapPages(all_warps * sizeof(Warp)));
  current_launch = &launch;
  for (uint32_t c = 0; c < launch.num_ctas; ++c) {
    Cta& cta = launch.ctas[c];
    cta.threads = kernel.threads;
    cta.fibers = &pool.fibers[size_t{c} * kernel.threads];
    cta.warps = warps + size_t{c} * num_warps;
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
  tsan::Acquire(&launch.ready);
  current_launch = nullptr;

  for (uint32_t c = 0; c < launch.num_ctas; ++c) {
    ::munmap(launch.ctas[c].shared_map, launch.ctas[c].shared_map_bytes);
    for (uint32_t w = 0; w < num_warps; ++w) {
      RawArray<OpenRequests>& open = launch.ctas[c].warps[w].open;
      for (size_t i = 0; i < open.size(); ++i) open[i].requests.Free();
      open.Free();
    }
  }
  for (size_t i = 0; i < launch.num_locations; ++i) {
    launch
        .location_chunks[i / Launch::kLocationChunk][i % Launch::kLocationChunk]
        .tags.Free();
  }
  for (size_t i = 0; i < launch.location_chunks.size(); ++i) {
    UnmapPages(launch.location_chunks[i],
               Launch::kLocationChunk * sizeof(Location));
  }
  launch.location_chunks.Free();
  launch.locations.Free();
  launch.ready.Free();
  launch.bulk.Free();
  UnmapPages(launch.clocks, 8 * Launch::kMostClocks);
  UnmapPages(launch.ctas, launch.num_ctas * sizeof(Cta));
  UnmapPages(warps, all_warps * sizeof(Warp));
  ::sigaltstack(&previous_stack, nullptr);
  ::munmap(signal_stack.ss_sp, kSignalStackBytes);
}

}  // namespace kvasir::kernels::emulation
