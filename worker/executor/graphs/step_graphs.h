// Keeps captured steps, each of which can be enqueued again as one graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "kernels/device/stream.h"
#include "worker/collective/collective.h"
#include "worker/executor/step/step_layout.h"

namespace kvasir::worker {

// Remembers the sizes (keys) of the latest steps, at most kMost different ones,
// and the captured work of each if there is any. A new key replaces the least
// recently used one.
//
// Owns: the captured work.
// Threads: one at a time, and not while captured work is being enqueued.
class StepGraphs {
 public:
  // The most steps to remember. They are limited, because captured steps take
  // some KiB of host and GPU memory for each launch. 64 suffice: batches change
  // slowly, so only a few sizes of steps alternate.
  static constexpr size_t kMost = 64;

  struct Step {
    // The sizes that the step's launches receive as arguments: exact sizes,
    // except that `histories` and `top` are padded as in StepBucket.
    StepSizes key;
    bool seen = false;  // whether a step with this key has run before
    std::unique_ptr<kernels::CapturedWork> work;  // null: not captured
    CollectiveTotals calls;  // collective calls of the captured work
  };

  static StepSizes KeyOf(const StepSizes& sizes, const StepBucket& bucket);

  // Returns the step with this key and marks it as the most recently used. Adds
  // it if it is not remembered.
  Step* Find(const StepSizes& key);
  // Forgets all steps if StepBlob::peaks has changed since the last call: the
  // blob may have moved, and captured launches contain its old address. `peaks`
  // changes on all ranks at the same step, so all ranks forget together.
  void UseBlob(int64_t peaks);

  size_t size() const { return steps_.size(); }

 private:
  std::list<Step> steps_;  // most recently used first
  int64_t peaks_ = 0;
};

}  // namespace kvasir::worker
