// Kernels for tests of the emulator. All but the last few have one deliberate
// fault, which the emulator must find. Only compiled for the host.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels::emulated {

enum class Planted : uint32_t {
  kNone,
  kMissingBarrier,      // no barrier between a store and another warp's load
  kMissingWarpBarrier,  // no SyncWarp between two lanes of a warp
  kReusedPartial,       // a warp overwrites what another has yet to read
  kLateWait,            // the wait for a copy comes after the read of its data
  kMissingWait,
  kMissingCommit,
  kMissingFence,         // no fence in the CTA that writes for another CTA
  kMissingReaderFence,   // no fence in the CTA that reads from another CTA
  kFenceOfCta,           // the fence's scope is only the CTA
  kFenceBeforeTheWrite,  // the fence precedes the write that it should order
  kDivergentBarrier,     // threads reach one barrier by two different calls
  kEndedThread,          // a thread ends before a barrier of all threads
  // Half of the lanes of each of two warps arrive at a barrier of 32 threads.
  // This is a fault, because barriers count whole warps.
  kHalfWarps,
  kTwiceAtABarrier,  // a warp arrives twice, the other not at all
  kDivergentShuffle,
  kStrangeMask,  // the mask lacks the calling lane
  kShuffleTooFar,
  kStuckPoll,
  kStuckPolls,             // a deadlock of threads that poll several addresses
  kLoadOnceOfStored,       // LoadOnce of data that the same launch stored
  kSharedLoadOutOfBounds,  // a load out of bounds by a primitive
  kSharedOutOfBounds,      // an access out of bounds by a plain pointer
  kSharedBefore,
  kGlobalLoadOutOfBounds,
  kGlobalOutOfBounds,
  kHostMemory,
  kMisalignedLoad,
  kMisalignedCopy,
  kScopeTooNarrow,
  kDeepStack,
  // The kernels from here on have no fault.
  kOwnPartials,
  kManyLooks,
  kLoadOnceBesideStored,
  // accesses every fourth word, which costs more bank passes and sectors
  kStrided,
};

struct FaultyArgs {
  const uint32_t* in = nullptr;  // 64 words
  uint32_t* out = nullptr;       // 64 words
  uint32_t* flag = nullptr;      // a word that is 0 at the start
  Planted planted = Planted::kNone;
};

// Launches one CTA of 64 threads, or two CTAs if the fault is between CTAs.
// Without the fault, the kernel would copy `in` to `out`, with each word passed
// from one thread to another.
void LaunchFaulty(const FaultyArgs& args, Launcher& launcher);
// Launches the kernel of two CTAs with all its fences, without a fault.
void LaunchFenced(const FaultyArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::emulated
