// Fibers, the choice of who goes on, meeting points, and reports.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "kernels/emulation/runtime.h"

#if !defined(__x86_64__)
#error "the emulator's context switch is written for x86-64"
#endif

// Saves the stack pointer and goes on from another; what a callee keeps of
// registers (System V) is on the stacks. A new stack has six zeros and an
// entry.
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

constinit thread_local Launch* current_launch = nullptr;
constinit thread_local Fiber* current_fiber = nullptr;

namespace {

// Polls without a change, for each thread that could go on, before the launch
// counts as stuck: any of those came up thousands of times.
constexpr int64_t kMostPolls = 4096;
constexpr int kReportedGroups = 16;

// Threads that wait in the same place, for a report.
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
      const Fiber& fiber = *cta.fibers[t];
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
                 group.cta->fibers[0]->place.cta_x,
                 group.cta->fibers[0]->place.cta_y, group.count, group.first);
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

void Stuck(const char* what) {
  std::fprintf(stderr, "emulated kernel %s: %s\n", current_launch->kernel->name,
               what);
  ReportThreads();
  std::abort();
}

Fiber* TakeReady() {
  Launch& launch = *current_launch;
  if (launch.ready.size() == 0) {
    Stuck("deadlock: all threads wait, or have ended");
  }
  return launch.ready.Take(Random() % launch.ready.size());
}

void SwitchTo(Fiber* next) {
  Launch& launch = *current_launch;
  Fiber* const from = current_fiber;
  current_fiber = next;
  tsan::SwitchTo(next != nullptr ? next->tsan : launch.main_tsan);
  kvasir_emulation_switch(
      from != nullptr ? &from->stack_pointer : &launch.main_stack_pointer,
      next != nullptr ? next->stack_pointer : launch.main_stack_pointer);
}

// Lets others go on until somebody puts the current thread among the ready.
void Suspend() {
  Fiber* const next = TakeReady();
  if (next != current_fiber) SwitchTo(next);
}

bool SameText(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}

}  // namespace

// xorshift64.
uint64_t Random() {
  uint64_t& x = current_launch->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x >> 11;
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

void Enter(const char* doing, Site site) {
  current_fiber->doing = doing;
  current_fiber->site = site;
}

bool LeftOut() {
  SiteTable& sites = *current_launch->sites;
  const Fiber& fiber = *current_fiber;
  int i = 0;
  while (i < sites.count && !(sites.entries[i].site.line == fiber.site.line &&
                              sites.entries[i].site.file == fiber.site.file &&
                              sites.entries[i].kind == fiber.doing)) {
    ++i;
  }
  if (i == SiteTable::kMost) Fault("a kernel has at most %d sites", i);
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

void Progress() { current_launch->polls = 0; }

void Yield() {
  Launch& launch = *current_launch;
  if (launch.bulk.size() > 0 && Random() % 64 == 0) LandBulk();
  launch.ready.Push(current_fiber);
  Suspend();
}

void Poll() {
  Launch& launch = *current_launch;
  if (launch.bulk.size() > 0 && Random() % 4 == 0) LandBulk();
  if (++launch.polls >
      kMostPolls * static_cast<int64_t>(launch.ready.size() + 1)) {
    Stuck("deadlock: threads look for what nobody will do any more");
  }
  Yield();
}

void Arrive(Meet& meet, const Arrival& arrival) {
  Launch& launch = *current_launch;
  Fiber& self = *current_fiber;
  if (meet.arrived == 0) {
    meet.doing = self.doing;
    meet.site = self.site;
    meet.expected = arrival.expected;
  } else if (arrival.same_site &&
             (meet.site.line != self.site.line ||
              meet.site.file != self.site.file || meet.doing != self.doing)) {
    Fault("divergent: others wait in %s at %s:%d", meet.doing,
          BaseName(meet.site.file), meet.site.line);
  } else if (meet.expected != arrival.expected) {
    Fault("%u threads are to come; others wait for %u", arrival.expected,
          meet.expected);
  }
  const uint32_t parity = meet.generation % 2;
  if (arrival.orders) tsan::Release(&meet.clocks[parity]);
  Progress();
  if (++meet.arrived < meet.expected) {
    if (!arrival.waits) return;
    self.waits_for = &meet;
    Suspend();
  } else {
    meet.arrived = 0;
    ++meet.generation;
    if (arrival.finish != nullptr) arrival.finish(arrival.context);
    Cta& cta = *self.cta;
    for (uint32_t t = 0; t < cta.threads; ++t) {
      Fiber* const fiber = cta.fibers[t];
      if (fiber->waits_for == &meet) {
        fiber->waits_for = nullptr;
        launch.ready.Push(fiber);
      }
    }
    if (!arrival.waits) return;
    Yield();
  }
  if (arrival.orders) tsan::Acquire(&meet.clocks[parity]);
}

const Place& Here() { return current_fiber->place; }
char* SharedMemory() { return current_fiber->cta->shared; }

void SyncCta(Site site) {
  Enter("SyncCta", site);
  if (LeftOut()) return;
  Cta& cta = *current_fiber->cta;
  Arrive(cta.barriers[0],
         {cta.threads, /*waits=*/true, /*orders=*/true, /*same_site=*/true,
          [](void* context) {
            Cta& all = *static_cast<Cta*>(context);
            for (uint32_t w = 0; w < all.threads / kLanes; ++w) {
              FlushRequests(all, w);
            }
          },
          &cta});
}

void Barrier(uint32_t id, uint32_t threads, bool waits, Site site) {
  Enter(waits ? "SyncBarrier" : "ArriveBarrier", site);
  Cta& cta = *current_fiber->cta;
  if (id < 1 || id > 15) Fault("barrier %u: want 1 to 15", id);
  if (threads < 1 || threads % kLanes != 0 || threads > cta.threads) {
    Fault("barrier of %u threads, want whole warps of %u", threads,
          cta.threads);
  }
  if (LeftOut()) return;
  Arrive(cta.barriers[id], {threads, waits, /*orders=*/true,
                            /*same_site=*/false, nullptr, nullptr});
}

namespace {

// What a fiber runs: from here on it is the kernel's thread until it ends.
void FiberMain() {
  Launch& launch = *current_launch;
  Fiber& self = *current_fiber;
  Cta& cta = *self.cta;
  tsan::Acquire(&cta.start_clock);
  launch.kernel->call(launch.kernel->function, launch.kernel->args);
  tsan::Release(&launch.ready);  // the launch's end, for the host
  self.ended = true;
  Progress();
  if (--cta.live == 0) {
    launch.ended_cta = &cta;
    SwitchTo(nullptr);
  } else {
    SwitchTo(TakeReady());
  }
  __builtin_trap();  // nobody goes on here
}

}  // namespace

void StartFiber(Fiber& fiber, size_t stack_bytes) {
  // The entry finds the stack as a call would leave it: 8 past a multiple
  // of 16.
  auto* top = reinterpret_cast<void**>(fiber.stack + stack_bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&FiberMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void RunUntilACtaEnds() { SwitchTo(TakeReady()); }

}  // namespace kvasir::kernels::emulation
