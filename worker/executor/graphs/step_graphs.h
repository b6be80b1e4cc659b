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

// Remembers the last kMost different kinds of step, captured or not. A new kind
// replaces the least recently used one.
//
// Owns: the captured work.
// Threads: one at a time, and not while captured work is being enqueued.
class StepGraphs {
 public:
  // Bounds the memory of captured steps: each takes some KiB of host and GPU
  // memory per launch, outside the pools. Few sequences start or end at a time,
  // so fewer than 64 different step sizes alternate.
  static constexpr size_t kMost = 64;

  struct Step {
    // All sizes that the step's launches depend on. Launches receive the exact
    // counts as arguments, except for `histories` and `top`: for these they
    // receive the padded counts of the bucket.
    StepSizes key;
    bool seen = false;  // whether a step with this key has run before
    std::unique_ptr<kernels::CapturedWork> work;  // null: not captured
    CollectiveTotals calls;  // collective calls of the captured work
  };

  static StepSizes KeyOf(const StepSizes& sizes, const StepBucket& bucket);

  // Returns the step with this key and marks it as the most recently used. Adds
  // it if it is not remembered.
  Step* Find(const StepSizes& key);
  // Forgets all steps if StepBlob::peaks has changed since the last call,
  // because the blob was then allocated anew and captured launches contain its
  // old address. All ranks forget at the same step, even a rank whose new blob
  // has the old address.
  void UseBlob(int64_t peaks);

  size_t size() const { return steps_.size(); }

 private:
  std::list<Step> steps_;  // most recently used first
  int64_t peaks_ = 0;
};

}  // namespace kvasir::worker
