// Emulates asynchronous copies. A requested copy first fills its destination
// with poison. The data of an ordinary copy arrives when the thread waits for
// it. The data of a bulk copy arrives at a random time before a wait for it
// ends.
#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {
namespace {

// The emulator's state in the 8 bytes of a CopyBarrier.
struct BarrierState {
  int32_t bytes_to_come;
  uint16_t arrivals_to_come;
  uint16_t count : 15;
  uint16_t parity : 1;
};
static_assert(sizeof(BarrierState) == 8);

BarrierState& StateOf(void* barrier) {
  CheckAligned(barrier, sizeof(BarrierState));
  CheckSharedRange(barrier, sizeof(BarrierState));
  return *static_cast<BarrierState*>(barrier);
}

void EndPhaseIfDone(BarrierState& state) {
  if (state.arrivals_to_come > 0 || state.bytes_to_come != 0) return;
  state.arrivals_to_come = state.count;
  state.parity ^= 1;
  Progress();
}

void BeginCopy(char* to, const char* from, size_t bytes, size_t alignment) {
  CheckAligned(to, alignment);
  CheckAligned(from, alignment);
  CheckSharedRange(to, bytes);
  CheckGlobalRange(from, bytes);
  tsan::Read(from, bytes);
  tsan::Write(to, bytes);
  PoisonBytes(to, bytes);
}

}  // namespace

void CopyAsync(void* shared, const void* global, uint32_t bytes, Site site) {
  Enter("CopyAsync", site);
  auto* const to = static_cast<char*>(shared);
  const auto* const from = static_cast<const char*>(global);
  BeginCopy(to, from, bytes, bytes);
  CountAccess(global, bytes, /*shared=*/false, /*stores=*/false);
  Fiber& self = *current_fiber;
  if (self.landed == self.copies.size()) {
    self.landed = 0;
    self.copies.Clear();
  }
  self.copies.Push({to, from, bytes, self.groups, site});
}

void CommitCopies(Site site) {
  Enter("CommitCopies", site);
  if (!LeftOut()) ++current_fiber->groups;
}

void WaitCopies(int pending, Site site) {
  Enter("WaitCopies", site);
  if (LeftOut()) return;
  Fiber& self = *current_fiber;
  while (self.landed < self.copies.size() &&
         self.copies[self.landed].group < self.groups - pending) {
    const PendingCopy& copy = self.copies[self.landed++];
    tsan::Read(copy.from, copy.bytes);
    tsan::Write(copy.to, copy.bytes);
    CopyPiece(copy.to, copy.from, copy.bytes);
  }
}

void InitCopyBarrier(void* barrier, uint32_t count, Site site) {
  Enter("InitCopyBarrier", site);
  BarrierState& state = StateOf(barrier);
  if (count < 1 || count > kMaxThreads) {
    Fault("the barrier is for %u arrivals, but must be for 1 to %u", count,
          kMaxThreads);
  }
  tsan::Write(barrier, sizeof(state));
  state.bytes_to_come = 0;
  state.arrivals_to_come = state.count = static_cast<uint16_t>(count & 0x7fff);
  state.parity = 0;
}

void ArriveExpecting(void* barrier, uint32_t bytes, Site site) {
  Enter("ArriveExpecting", site);
  if (LeftOut()) return;
  BarrierState& state = StateOf(barrier);
  tsan::Read(barrier, sizeof(state));
  if (state.arrivals_to_come == 0) {
    Fault("the barrier has already had all %u arrivals of its phase",
          uint32_t{state.count});
  }
  tsan::Release(&LocationOf(barrier).phases[state.parity]);
  state.bytes_to_come += static_cast<int32_t>(bytes);
  --state.arrivals_to_come;
  EndPhaseIfDone(state);
}

void WaitPhase(void* barrier, uint32_t phase, Site site) {
  Enter("WaitPhase", site);
  if (LeftOut()) return;
  BarrierState& state = StateOf(barrier);
  tsan::Read(barrier, sizeof(state));
  // The end of a phase flips the barrier's parity, so `phase` has ended once
  // the parity differs from phase % 2.
  while (static_cast<const volatile BarrierState&>(state).parity == phase % 2) {
    Poll(barrier, state.parity);
  }
  tsan::Acquire(&LocationOf(barrier).phases[phase % 2]);
}

void CopyBulk(void* shared, const void* global, uint32_t bytes, void* barrier,
              Site site) {
  Enter("CopyBulk", site);
  if (bytes == 0 || bytes % 16 != 0) {
    Fault("the copy has %u bytes, but must have a multiple of 16, above 0",
          bytes);
  }
  BarrierState& state = StateOf(barrier);
  auto* const to = static_cast<char*>(shared);
  const auto* const from = static_cast<const char*>(global);
  BeginCopy(to, from, bytes, 16);
  // Reports to ThreadSanitizer that the copy happens before everything that a
  // thread does after it has waited for this phase.
  tsan::Read(barrier, sizeof(state));
  tsan::Release(&LocationOf(barrier).phases[state.parity]);
  current_launch->bulk.Push({to, from, bytes, static_cast<char*>(barrier)});
}

void LandBulk() {
  RawArray<BulkCopy>& bulk = current_launch->bulk;
  const BulkCopy copy = bulk.Take(RandomBelow(bulk.size()));
  CopyBytes(copy.to, copy.from, copy.bytes);
  auto& state = *reinterpret_cast<BarrierState*>(copy.barrier);
  state.bytes_to_come -= static_cast<int32_t>(copy.bytes);
  EndPhaseIfDone(state);
}

}  // namespace kvasir::kernels::emulation
