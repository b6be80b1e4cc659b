// Captured steps, which can be enqueued again as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "kernels/device/stream.h"
#include "worker/collective/collective.h"
#include "worker/executor/step/step_layout.h"

namespace kvasir::worker {

// Remembers the last kMost different steps, captured or not. A new one replaces
// the step that has not been used for the longest time.
//
// Owns: the captured work.
// Threads: one at a time, while none of the work is being enqueued.
class StepGraphs {
 public:
  // A captured step takes memory of host and GPU outside the pools: some KiB
  // for each of its launches. Only a few sequences come or go at a time, so
  // fewer sizes than this alternate.
  static constexpr size_t kMost = 64;

  struct Step {
    // Everything that the step's launches depend on, apart from addresses.
    // Launches receive true counts by value, except for histories and tops,
    // where they receive the bucket's.
    StepSizes key;
    bool seen = false;  // whether a step of this key came before
    std::unique_ptr<kernels::CapturedWork> work;  // null: not captured
    CollectiveTotals calls;  // collective calls of the captured work
  };

  static StepSizes KeyOf(const StepSizes& sizes, const StepBucket& bucket);

  // Returns the step of this key and marks it as the last used.
  Step* Find(const StepSizes& key);
  // Forgets all steps if StepBlob::peaks has changed since the last call,
  // because memory that their launches name may have moved. All ranks forget at
  // the same step, whatever their addresses.
  void UseBlob(int64_t peaks);

  size_t size() const { return steps_.size(); }

 private:
  std::list<Step> steps_;  // the last used first
  int64_t peaks_ = 0;
};

}  // namespace kvasir::worker
