// Steps that were captured, to be enqueued again as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "kernels/device/stream.h"
#include "worker/collective/collective.h"
#include "worker/executor/step/step_layout.h"

namespace kvasir::worker {

// The steps that came last, at most kMost of them, captured or not: another one
// takes the place of the one that has not come for longest.
//
// Owns: what was captured. Threads: one at a time, none of it under way.
class StepGraphs {
 public:
  // A captured step takes memory of the host and of the GPU beside the pools,
  // some KiB for each of its launches. Sequences come and go a few at a time,
  // so that fewer sizes than this are in turn.
  static constexpr size_t kMost = 64;

  struct Step {
    // What its launches depend on beside addresses: true counts, which they
    // have by value, but for histories and tops, of which they have the
    // bucket's.
    StepSizes key;
    bool seen = false;                            // before
    std::unique_ptr<kernels::CapturedWork> work;  // null: not captured
    CollectiveTotals calls;                       // of it
  };

  static StepSizes KeyOf(const StepSizes& sizes, const StepBucket& bucket);

  // The step of this key, from now on the one that came last.
  Step* Find(const StepSizes& key);
  // Forgets all steps where memory that their launches name may be elsewhere
  // than when this was called last: where StepBlob::peaks is another. All ranks
  // forget at the same step, whatever their addresses.
  void UseBlob(int64_t peaks);

  size_t size() const { return steps_.size(); }

 private:
  std::list<Step> steps_;  // the last one first
  int64_t peaks_ = 0;
};

}  // namespace kvasir::worker
