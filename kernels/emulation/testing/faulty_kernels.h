// Kernels with one planted fault each, which the emulated device has to find.
// Only compiled for the host.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels::emulated {

enum class Planted : uint32_t {
  kNone,
  kMissingBarrier,      // between a store and another warp's load
  kMissingWarpBarrier,  // between two lanes of a warp
  kReusedPartial,       // a warp overwrites what another has yet to read
  kLateWait,            // the wait for a copy comes after the read
  kMissingWait,
  kMissingCommit,
  kMissingFence,         // between CTAs, in the one that writes
  kMissingReaderFence,   // in the one that reads
  kFenceOfCta,           // its scope is too narrow
  kFenceBeforeTheWrite,  // precedes the write that it should order
  kDivergentBarrier,     // two calls for one barrier
  kEndedThread,          // ends before a barrier of all threads
  kHalfWarps,            // two half warps add up to the barrier's count
  kTwiceAtABarrier,      // a thread arrives again before the others do
  kDivergentShuffle,
  kStrangeMask,  // lacks the calling lane
  kShuffleTooFar,
  kStuckPoll,
  kStuckPolls,             // at several addresses
  kLoadOnceOfStored,       // by the same launch
  kSharedLoadOutOfBounds,  // through a primitive
  kSharedOutOfBounds,      // through a pointer
  kSharedBefore,
  kGlobalLoadOutOfBounds,
  kGlobalOutOfBounds,
  kHostMemory,
  kMisalignedLoad,
  kMisalignedCopy,
  kScopeTooNarrow,
  kDeepStack,
  // Without a fault.
  kOwnPartials,
  kManyLooks,
  kLoadOnceBesideStored,
  kStrided,  // correct, but costly
};

struct FaultyArgs {
  const uint32_t* in = nullptr;  // 64 words
  uint32_t* out = nullptr;       // 64 words
  uint32_t* flag = nullptr;      // 0
  Planted planted = Planted::kNone;
};

// Launches one CTA of 64 threads, or two for faults between CTAs. A correct
// kernel copies `in` to `out`; each thread copies a word that another warp
// (lane, CTA) wrote.
void LaunchFaulty(const FaultyArgs& args, Launcher& launcher);
// Launches two CTAs with all fences in place.
void LaunchFenced(const FaultyArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::emulated
