// Kernels with one fault each, that the emulated device has to find. For the
// host alone.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"

namespace kvasir::kernels::emulated {

enum class Planted : uint32_t {
  kNone,
  kMissingBarrier,      // between a store and another warp's load
  kMissingWarpBarrier,  // the same between lanes
  kReusedPartial,       // a warp writes what another has still to read
  kLateWait,            // for a copy, when it was read
  kMissingWait,
  kMissingCommit,
  kMissingFence,         // between CTAs, by the one that writes
  kMissingReaderFence,   // by the one that reads
  kFenceOfCta,           // too narrow
  kFenceBeforeTheWrite,  // orders what is not there yet
  kDivergentBarrier,     // two calls for one barrier
  kEndedThread,          // before a barrier of all
  kHalfWarps,            // that make up the number of a barrier
  kTwiceAtABarrier,      // before the others come
  kDivergentShuffle,
  kStrangeMask,  // without the lane that gives it
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
  // Nothing wrong.
  kOwnPartials,
  kManyLooks,
  kLoadOnceBesideStored,
  kStrided,  // but for what it costs
};

struct FaultyArgs {
  const uint32_t* in = nullptr;  // 64 words
  uint32_t* out = nullptr;       // 64 words
  uint32_t* flag = nullptr;      // 0
  Planted planted = Planted::kNone;
};

// One CTA of 64 threads, or two for those between CTAs: out = in, of another
// warp's (lane's, CTA's) reading.
void LaunchFaulty(const FaultyArgs& args, Launcher& launcher);
// Two CTAs, with all fences where they belong.
void LaunchFenced(const FaultyArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::emulated
