#include "kernels/emulation/testing/faulty_kernels.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/rows.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::emulated {
namespace {

constexpr uint32_t kThreads = 64;

// Each thread stores one word, then loads a word that a thread of the other
// warp stored.
void Exchange(const FaultyArgs& args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t thread = simt::Thread();
  simt::StoreShared(words + thread, args.in[thread]);
  if (args.planted != Planted::kMissingBarrier) simt::SyncCta();
  args.out[thread ^ 32] = simt::LoadShared(words + (thread ^ 32));
}

void ExchangeInWarp(const FaultyArgs& args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t thread = simt::Thread();
  simt::StoreShared(words + thread, args.in[thread]);
  if (args.planted != Planted::kMissingWarpBarrier) simt::SyncWarp();
  args.out[thread ^ 1] = simt::LoadShared(words + (thread ^ 1));
}

// Computes three sums over the CTA's threads: each thread contributes 1, then
// 2, then 3.
void Sums(const FaultyArgs& args) {
  auto* const partial = reinterpret_cast<float*>(simt::Shared());
  const uint32_t warps = simt::Threads() / simt::kWarp;
  bool right = true;
  for (uint32_t i = 0; i < 3; ++i) {
    const bool own = args.planted != Planted::kReusedPartial;
    const auto number = static_cast<float>(i + 1);
    const float sum = simt::CtaSum(number, partial + (own ? warps * i : 0));
    right &= sum == number * kThreads;
  }
  const uint32_t thread = simt::Thread();
  args.out[thread] = right ? args.in[thread] : 0;
}

void Copy(const FaultyArgs& args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t thread = simt::Thread();
  simt::CopyAsync<4>(words + thread, args.in + thread);
  if (args.planted != Planted::kMissingCommit) simt::CommitCopies();
  const bool late = args.planted == Planted::kLateWait;
  if (!late && args.planted != Planted::kMissingWait) simt::WaitCopies<0>();
  args.out[thread] = simt::LoadShared(words + thread);
  if (late) simt::WaitCopies<0>();
}

// CTA 0 writes `out` and raises the flag; CTA 1 waits for the flag and reads
// `out`.
void HandOver(const FaultyArgs& args) {
  const Planted planted = args.planted;
  const uint32_t thread = simt::Thread();
  if (simt::CtaX() == 0) {
    if (planted == Planted::kFenceBeforeTheWrite) {
      simt::Fence<simt::Scope::kGpu>();
    }
    args.out[thread] = args.in[thread];
    simt::SyncCta();
    if (thread != 0) return;
    if (planted == Planted::kFenceOfCta) {
      simt::Fence<simt::Scope::kCta>();
    } else if (planted != Planted::kMissingFence &&
               planted != Planted::kFenceBeforeTheWrite) {
      simt::Fence<simt::Scope::kGpu>();
    }
    simt::StoreAtomic(args.flag, 1u);
  } else {
    if (thread == 0) {
      while (simt::LoadAtomic(args.flag) == 0) {
      }
      if (planted != Planted::kMissingReaderFence) {
        simt::Fence<simt::Scope::kGpu>();
      }
    }
    simt::SyncCta();
    if (args.out[thread] != args.in[thread]) args.flag[0] = 2;
  }
}

// Recurses until the thread's stack overflows. `volatile` keeps the compiler
// from removing the recursion or its memory.
__attribute__((noinline)) uint32_t Deep(uint32_t depth) {
  volatile char bytes[1024];
  bytes[depth % 1024] = 1;
  return depth == 0 ? 0 : Deep(depth - 1) + static_cast<uint32_t>(bytes[0]);
}

void Others(const FaultyArgs& args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t thread = simt::Thread();
  static uint32_t of_the_host = 7;
  switch (args.planted) {
    case Planted::kDivergentBarrier:
      if (thread < 32) {
        simt::SyncCta();
      } else {
        simt::SyncCta();
      }
      break;
    case Planted::kEndedThread:
      if (thread == 5) return;
      simt::SyncCta();
      break;
    case Planted::kDivergentShuffle:
      if (thread % 2 == 0) {
        args.out[thread] = simt::ShuffleXor(thread, 1);
      } else {
        args.out[thread] = simt::ShuffleXor(thread, 1);
      }
      break;
    case Planted::kStrangeMask:
      args.out[thread] = simt::ShuffleXor(thread, 1, 0xffff0000u);
      break;
    case Planted::kStuckPoll:
      while (simt::LoadAtomic(args.flag) == 0) {
      }
      break;
    case Planted::kStuckPolls:
      while (simt::LoadAtomic(args.flag) == 0 &&
             simt::AtomicCas(args.out, 1u, 1u) == 0) {
      }
      break;
    case Planted::kHalfWarps:
      if (thread % 32 < 16) simt::SyncBarrier(1, 32);
      break;
    case Planted::kTwiceAtABarrier:
      if (thread < 32) {
        simt::ArriveBarrier(1, 64);
        simt::ArriveBarrier(1, 64);
      }
      break;
    case Planted::kShuffleTooFar:
      args.out[thread] = simt::ShuffleXor(thread, 32);
      break;
    case Planted::kLoadOnceOfStored:
      simt::StoreGlobal(args.out + thread, thread);
      args.out[thread] = simt::LoadOnce(args.out + thread);
      break;
    case Planted::kLoadOnceBesideStored:
      // The loads and stores of a thread use different bytes of the same
      // 16-byte block.
      if (thread < 16) {
        simt::StoreGlobal(args.out + 4 * thread, thread);
        args.out[4 * thread + 1] = simt::LoadOnce(args.out + 4 * thread + 3);
      }
      break;
    case Planted::kManyLooks: {
      // With this many polls, the emulator would report a deadlock if the
      // polled addresses did not change.
      uint32_t seen = 0;
      for (uint32_t i = 0; i < 3000; ++i) {
        seen |= simt::LoadAtomic(args.in + (thread + i) % 64);
        simt::AtomicMax(reinterpret_cast<int32_t*>(args.flag), 0);
      }
      args.out[thread] = seen != 0 ? args.in[thread] : 0;
      break;
    }
    case Planted::kSharedLoadOutOfBounds:
      args.out[thread] = simt::LoadShared(words + thread + 1);
      break;
    case Planted::kSharedOutOfBounds:
      args.out[thread] = *static_cast<volatile uint32_t*>(words + thread + 1);
      break;
    case Planted::kSharedBefore:
      *static_cast<volatile uint32_t*>(words - 1) = 1;
      break;
    case Planted::kGlobalLoadOutOfBounds:
      args.out[thread] = simt::LoadGlobal(args.in + thread + 1);
      break;
    case Planted::kGlobalOutOfBounds:
      args.out[thread] =
          *static_cast<const volatile uint32_t*>(args.in + thread + 1);
      break;
    case Planted::kHostMemory:
      args.out[thread] = simt::LoadGlobal(&of_the_host);
      break;
    case Planted::kMisalignedLoad:
      args.out[thread] =
          simt::LoadGlobal(reinterpret_cast<const simt::Vec16*>(args.in + 1))
              .word[0];
      break;
    case Planted::kMisalignedCopy:
      simt::CopyAsync<16>(simt::Shared() + 8, args.in);
      break;
    case Planted::kScopeTooNarrow:
      simt::AtomicAdd<simt::Scope::kCta>(args.flag, 1u);
      break;
    case Planted::kDeepStack:
      args.out[thread] = Deep(1000);
      break;
    case Planted::kStrided:
      // Reads every fourth of 64 words.
      args.out[thread] = simt::LoadShared(words + thread % 16 * 4);
      args.out[thread] = simt::LoadGlobal(args.in + thread % 16 * 4);
      break;
    default:
      break;
  }
}

void FaultyKernel(FaultyArgs args) {
  switch (args.planted) {
    case Planted::kNone:
      Exchange(args);
      simt::SyncCta();
      ExchangeInWarp(args);
      simt::SyncCta();
      Copy(args);
      break;
    case Planted::kMissingBarrier:
      return Exchange(args);
    case Planted::kMissingWarpBarrier:
      return ExchangeInWarp(args);
    case Planted::kOwnPartials:
    case Planted::kReusedPartial:
      return Sums(args);
    case Planted::kLateWait:
    case Planted::kMissingWait:
    case Planted::kMissingCommit:
      return Copy(args);
    case Planted::kMissingFence:
    case Planted::kMissingReaderFence:
    case Planted::kFenceOfCta:
    case Planted::kFenceBeforeTheWrite:
      return HandOver(args);
    default:
      return Others(args);
  }
}

// HandOver with all its fences, if no fault is planted.
void FencedKernel(FaultyArgs args) { HandOver(args); }

bool BetweenCtas(Planted planted) {
  return planted == Planted::kMissingFence ||
         planted == Planted::kMissingReaderFence ||
         planted == Planted::kFenceOfCta ||
         planted == Planted::kFenceBeforeTheWrite ||
         planted == Planted::kScopeTooNarrow;
}

}  // namespace

void LaunchFaulty(const FaultyArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "faulty";
  launch.grid_x = BetweenCtas(args.planted) ? 2 : 1;
  launch.ctas_together = true;
  launch.threads = kThreads;
  launch.shared_bytes = kThreads * 4;
  simt::Launch(launcher, launch, FaultyKernel, args);
}

void LaunchFenced(const FaultyArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "fenced";
  launch.grid_x = 2;
  launch.ctas_together = true;
  launch.threads = kThreads;
  simt::Launch(launcher, launch, FencedKernel, args);
}

}  // namespace kvasir::kernels::emulated
