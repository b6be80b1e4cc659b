// The scheduler of CUDA threads: switches between their fibers, chooses the
// next thread, lets threads wait for each other at meeting points, and reports
// faults.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "kernels/emulation/runtime.h"

#if !defined(__x86_64__)
#error "the emulator's context switch is written for x86-64"
#endif

// Switches to another stack. Pushes the registers that a callee must preserve
// (System V ABI) and saves the stack pointer to *save. Then loads the other
// stack pointer and pops the registers from there. A new stack holds six zeros
// for these registers, and the address of its entry function.
extern "C" void kvasir_emulation_switch(void** save, void* load);
asm(R"(
.text
.globl kvasir_emulation_switch
.type kvasir_emulation_switch,@function
kvasir_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvasir_emulation_switch, .-kvasir_emulation_switch
)");

namespace kvasir::kernels::emulation {

KVASIR_EMULATION_TLS Launch* current_launch = nullptr;
KVASIR_EMULATION_TLS Fiber* current_fiber = nullptr;
KVASIR_EMULATION_TLS const Place* current_place = nullptr;

namespace {

// If no thread makes progress during this many polls per ready thread, the
// launch is reported as a deadlock.
constexpr int64_t kMostPolls = 4096;
constexpr int kReportedGroups = 16;

// Threads of a CTA that are at the same source line and in the same state. The
// report of a deadlock lists them together.
struct Group {
  const Cta* cta;
  const char* doing;
  Site site;
  bool ended, waits;
  uint32_t first, count;
};

void ReportThreads() {
  Launch& launch = *current_launch;
  Group groups[kReportedGroups];
  int num_groups = 0;
  for (uint32_t c = 0; c < launch.num_ctas; ++c) {
    Cta& cta = launch.ctas[c];
    for (uint32_t t = 0; t < cta.threads; ++t) {
      const Fiber& fiber = cta.fibers[t];
      const Group group = {&cta,
                           fiber.doing,
                           fiber.site,
                           fiber.ended,
                           fiber.waits_for != nullptr,
                           t,
                           1};
      int i = 0;
      while (i < num_groups &&
             !(groups[i].cta == group.cta && groups[i].ended == group.ended &&
               (group.ended || (groups[i].waits == group.waits &&
                                groups[i].site.line == group.site.line &&
                                groups[i].doing == group.doing)))) {
        ++i;
      }
      if (i < num_groups) {
        ++groups[i].count;
      } else if (num_groups < kReportedGroups) {
        groups[num_groups++] = group;
      }
    }
  }
  for (int i = 0; i < num_groups; ++i) {
    const Group& group = groups[i];
    std::fprintf(stderr, "  CTA (%u, %u): %u threads from %u on ",
                 group.cta->fibers[0].place.cta_x,
                 group.cta->fibers[0].place.cta_y, group.count, group.first);
    if (group.ended) {
      std::fprintf(stderr, "have ended\n");
    } else if (group.doing == nullptr) {
      std::fprintf(stderr, "have not begun\n");
    } else {
      std::fprintf(stderr, "%s %s at %s:%d\n",
                   group.waits ? "wait in" : "are at", group.doing,
                   BaseName(group.site.file), group.site.line);
    }
  }
}

[[noreturn]] void Stuck(const char* what) {
  std::fprintf(stderr, "emulated kernel %s: %s\n", current_launch->kernel->name,
               what);
  ReportThreads();
  std::abort();
}

constexpr char kAllWait[] = "deadlock: all threads wait, or have ended";

// the number of ranks in a word of ready_ranks, which has a bit for each
constexpr uint32_t kRanks = 64;

void SetRankReady(Launch& launch, const Warp& warp) {
  launch.ready_ranks[warp.rank / kRanks] |= uint64_t{1} << warp.rank % kRanks;
}
void SetRankIdle(Launch& launch, const Warp& warp) {
  launch.ready_ranks[warp.rank / kRanks] &=
      ~(uint64_t{1} << warp.rank % kRanks);
}

void SwapRanks(Launch& launch, Warp& a, Warp& b) {
  if (a.ready != 0) SetRankIdle(launch, a);
  if (b.ready != 0) SetRankIdle(launch, b);
  const uint32_t rank = a.rank;
  a.rank = b.rank;
  b.rank = rank;
  launch.by_rank[a.rank] = &a;
  launch.by_rank[b.rank] = &b;
  if (a.ready != 0) SetRankReady(launch, a);
  if (b.ready != 0) SetRankReady(launch, b);
}

Warp& FirstReadyWarp(Launch& launch) {
  size_t word = 0;
  while (launch.ready_ranks[word] == 0) {
    if (++word == launch.ready_ranks.size()) Stuck(kAllWait);
  }
  const auto bit =
      static_cast<size_t>(__builtin_ctzll(launch.ready_ranks[word]));
  return *launch.by_rank[word * kRanks + bit];
}

// Takes the first ready lane at or after `first`, or the first ready lane of
// the warp if there is none. The lane is then no longer ready.
Fiber* TakeLane(Launch& launch, Warp& warp, uint32_t first) {
  const uint32_t turned =
      warp.ready >> first | warp.ready << ((kLanes - first) % kLanes);
  const uint32_t lane =
      (static_cast<uint32_t>(__builtin_ctz(turned)) + first) % kLanes;
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) SetRankIdle(launch, warp);
  return &warp.lanes[lane];
}

size_t CountReady() {
  const Launch& launch = *current_launch;
  if (launch.order == ThreadOrder::kAny) return launch.ready.size();
  size_t count = 0;
  for (uint32_t w = 0; w < launch.num_warps; ++w) {
    count += static_cast<size_t>(__builtin_popcount(launch.by_rank[w]->ready));
  }
  return count;
}

Fiber* TakeReady() {
  Launch& launch = *current_launch;
  if (launch.order == ThreadOrder::kAny) {
    if (launch.ready.size() == 0) Stuck(kAllWait);
    return launch.ready.Take(RandomBelow(launch.ready.size()));
  }
  constexpr uint64_t kAnyOneOf = 8;
  constexpr int kTries = 4;
  const uint64_t random = Random();
  const auto lane = static_cast<uint32_t>(random / kAnyOneOf % kLanes);
  if (random % kAnyOneOf == 0) {
    for (int i = 0; i < kTries; ++i) {
      Warp& warp = *launch.by_rank[RandomBelow(launch.num_warps)];
      if (warp.ready != 0) return TakeLane(launch, warp, lane);
    }
  }
  return TakeLane(launch, FirstReadyWarp(launch), lane);
}

void SwitchTo(Fiber* next) {
  Launch& launch = *current_launch;
  Fiber* const from = current_fiber;
  current_fiber = next;
  current_place = next != nullptr ? &next->place : nullptr;
  tsan::SwitchTo(next != nullptr ? next->tsan : launch.main_tsan);
  kvasir_emulation_switch(
      from != nullptr ? &from->stack_pointer : &launch.main_stack_pointer,
      next != nullptr ? next->stack_pointer : launch.main_stack_pointer);
}

// Runs other threads until the current thread is ready and is chosen again.
void Suspend() {
  Fiber* const next = TakeReady();
  if (next != current_fiber) SwitchTo(next);
}

bool SameText(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}

}  // namespace

void MakeReady(Warp& warp, uint32_t lanes) {
  Launch& launch = *current_launch;
  if (launch.order != ThreadOrder::kAny) {
    if (lanes == 0) return;
    warp.ready |= lanes;
    SetRankReady(launch, warp);
    return;
  }
  for (; lanes != 0; lanes &= lanes - 1) {
    launch.ready.Push(&warp.lanes[__builtin_ctz(lanes)]);
  }
}

void PlaceWarps(Cta& cta) {
  Launch& launch = *current_launch;
  if (launch.order == ThreadOrder::kAny) return;
  for (uint32_t w = 0; w < cta.threads / kLanes; ++w) {
    SwapRanks(launch, cta.warps[w],
              *launch.by_rank[RandomBelow(launch.num_warps)]);
  }
}

const char* BaseName(const char* path) {
  const char* base = path;
  for (const char* at = path; *at != '\0'; ++at) {
    if (*at == '/') base = at + 1;
  }
  return base;
}

void Fault(const char* what, ...) {
  const Fiber* const fiber = current_fiber;
  std::fprintf(stderr, "emulated kernel %s", current_launch->kernel->name);
  if (fiber != nullptr) {
    std::fprintf(stderr, ", CTA (%u, %u), thread %u", fiber->place.cta_x,
                 fiber->place.cta_y, fiber->place.thread);
    if (fiber->doing != nullptr) {
      std::fprintf(stderr, ", %s at %s:%d", fiber->doing,
                   BaseName(fiber->site.file), fiber->site.line);
    }
  }
  std::fprintf(stderr, ": ");
  va_list arguments;
  va_start(arguments, what);
  std::vfprintf(stderr, what, arguments);  // NOLINT: va_start is above
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::abort();
}

bool LeftOut() {
  Launch& launch = *current_launch;
  SiteTable& sites = *launch.sites;
  const Fiber& fiber = *current_fiber;
  const auto is_here = [&](int i) {
    const SiteTable::Entry& entry = sites.entries[i];
    return entry.site.line == fiber.site.line &&
           entry.site.file == fiber.site.file && entry.kind == fiber.doing;
  };
  int& last =
      launch
          .site_of_line[static_cast<size_t>(fiber.site.line) % Launch::kLines];
  int i = last;
  if (i >= sites.count || !is_here(i)) {
    i = 0;
    while (i < sites.count && !is_here(i)) ++i;
    last = i;
  }
  if (i == SiteTable::kMost) {
    Fault("the kernel has more than %d lines that synchronize", i);
  }
  if (i == sites.count) {
    sites.entries[sites.count++] = {fiber.site, fiber.doing, 0};
    if (sites.out_file != nullptr && fiber.site.line == sites.out_line &&
        SameText(BaseName(fiber.site.file), sites.out_file) &&
        SameText(fiber.doing, sites.out_kind)) {
      sites.out_index = i;
    }
  }
  ++sites.entries[i].passes;
  return i == sites.out_index;
}

void Yield() {
  Launch& launch = *current_launch;
  if (launch.bulk.size() > 0 && RandomBelow(64) == 0) LandBulk();
  Fiber& self = *current_fiber;
  MakeReady(*self.warp, 1u << self.lane);
  Suspend();
}

void Poll(const void* at, uint64_t value) {
  Launch& launch = *current_launch;
  Fiber& self = *current_fiber;
  if (launch.bulk.size() > 0 && RandomBelow(4) == 0) LandBulk();
  bool again = false;
  for (const Look& look : self.looks) {
    again |= look.at == at && look.value == value;
  }
  if (!again) {
    self.looks[self.num_looks++ % Fiber::kLooks] = {at, value};
    Progress();
    Yield();
    return;
  }
  if (++launch.polls > kMostPolls &&
      launch.polls > kMostPolls * static_cast<int64_t>(CountReady() + 1)) {
    Stuck("deadlock: threads poll for changes that no thread will make");
  }
  // Lets another warp run next, because this thread waits for others.
  if (launch.order != ThreadOrder::kAny) {
    SwapRanks(launch, *self.warp,
              *launch.by_rank[RandomBelow(launch.num_warps)]);
  }
  MakeReady(*self.warp, 1u << self.lane);
  Suspend();
}

namespace {

void Wake(Warp& warp, uint32_t& lanes) {
  MakeReady(warp, lanes);
  lanes = 0;
}

}  // namespace

void Arrive(Meet& meet, const Arrival& arrival) {
  Fiber& self = *current_fiber;
  Cta& cta = *self.cta;
  if (meet.arrived == 0) {
    meet.doing = self.doing;
    meet.site = self.site;
    meet.expected = arrival.expected;
  } else if (arrival.same_site &&
             (meet.site.line != self.site.line ||
              meet.site.file != self.site.file || meet.doing != self.doing)) {
    Fault("divergent: other threads wait in %s at %s:%d", meet.doing,
          BaseName(meet.site.file), meet.site.line);
  } else if (meet.expected != arrival.expected) {
    Fault(
        "the thread expects %u threads, but threads that wait there expect %u",
        arrival.expected, meet.expected);
  }
  const uint32_t parity = meet.generation % 2;
  if (arrival.orders) tsan::Release(&meet.clocks[parity]);
  Progress();
  CtaBarrier* const barrier = arrival.barrier;
  if (++meet.arrived < meet.expected) {
    if (!arrival.waits) return;
    uint32_t& waiting = barrier != nullptr
                            ? barrier->waiting[self.place.thread / kLanes]
                            : meet.waiting;
    waiting |= 1u << self.lane;
    self.waits_for = &meet;
    Suspend();
    self.waits_for = nullptr;
  } else {
    meet.arrived = 0;
    ++meet.generation;
    if (arrival.finish != nullptr) arrival.finish(arrival.context);
    if (barrier == nullptr) {
      Wake(*self.warp, meet.waiting);
    } else {
      for (uint32_t w = 0; w < cta.threads / kLanes; ++w) {
        Wake(cta.warps[w], barrier->waiting[w]);
      }
    }
    if (!arrival.waits) return;
    Yield();
  }
  if (arrival.orders) tsan::Acquire(&meet.clocks[parity]);
}

void SyncCta(Site site) {
  Enter("SyncCta", site);
  if (LeftOut()) return;
  Cta& cta = *current_fiber->cta;
  Arrive(cta.barriers[0].meet, {cta.threads, /*waits=*/true, /*orders=*/true,
                                /*same_site=*/true, &cta.barriers[0],
                                [](void* context) {
                                  Cta& all = *static_cast<Cta*>(context);
                                  for (uint32_t w = 0; w < all.threads / kLanes;
                                       ++w) {
                                    FlushRequests(all, w);
                                  }
                                },
                                &cta});
}

// As in PTX, barriers count whole warps.
void Barrier(uint32_t id, uint32_t threads, bool waits, Site site) {
  Enter(waits ? "SyncBarrier" : "ArriveBarrier", site);
  const Fiber& self = *current_fiber;
  Cta& cta = *self.cta;
  if (id < 1 || id > 15) {
    Fault("the barrier's number is %u, but must be 1 to 15", id);
  }
  if (threads < 1 || threads % kLanes != 0 || threads > cta.threads) {
    Fault(
        "the barrier is for %u threads, but must be for whole warps of the "
        "CTA's %u threads",
        threads, cta.threads);
  }
  if (LeftOut()) return;
  CtaBarrier& barrier = cta.barriers[id];
  uint32_t& came = barrier.came[self.place.thread / kLanes];
  if ((came >> self.lane & 1) != 0) {
    Fault(
        "barrier %u: the thread arrives again before all %u threads have "
        "arrived",
        id, threads);
  }
  came |= 1u << self.lane;
  Arrive(barrier.meet,
         {threads, waits, /*orders=*/true, /*same_site=*/false, &barrier,
          [](void* context) {
            auto& all = *static_cast<CtaBarrier*>(context);
            for (uint32_t w = 0; w < kMaxWarps; ++w) {
              if (all.came[w] != 0 && all.came[w] != ~0u) {
                Fault(
                    "a barrier counts whole warps: of warp %u only %d lanes "
                    "have arrived",
                    w, __builtin_popcount(all.came[w]));
              }
              all.came[w] = 0;
            }
          },
          &barrier});
}

namespace {

// The entry function of a fiber: runs one thread of the kernel from start to
// end.
void FiberMain() {
  Launch& launch = *current_launch;
  Fiber& self = *current_fiber;
  Cta& cta = *self.cta;
  tsan::Acquire(&cta.start_clock);
  launch.kernel->call(launch.kernel->function, launch.kernel->args);
  // For ThreadSanitizer: the host reads results after this thread has ended.
  tsan::Release(&launch.ended_cta);
  if (self.landed < self.copies.size()) {
    const Site& site = self.copies[self.landed].site;
    Fault(
        "the thread ended with %zu copies that it never waited for, the first "
        "from %s:%d",
        self.copies.size() - self.landed, BaseName(site.file), site.line);
  }
  self.ended = true;
  Progress();
  if (--cta.live == 0) {
    launch.ended_cta = &cta;
    SwitchTo(nullptr);
  } else {
    SwitchTo(TakeReady());
  }
  __builtin_trap();  // a fiber that has ended is never resumed
}

}  // namespace

void StartFiber(Fiber& fiber, size_t stack_bytes) {
  // The ABI requires that at a function's entry the stack pointer is 8 bytes
  // below a multiple of 16, as after a call instruction.
  auto* top = reinterpret_cast<void**>(fiber.stack + stack_bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&FiberMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void RunUntilACtaEnds() { SwitchTo(TakeReady()); }

}  // namespace kvasir::kernels::emulation
