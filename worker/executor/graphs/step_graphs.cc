#include "worker/executor/graphs/step_graphs.h"

#include <algorithm>
#include <utility>

namespace kvasir::worker {

StepSizes StepGraphs::KeyOf(const StepSizes& sizes, const StepBucket& bucket) {
  StepSizes key = sizes;
  key.histories = bucket.padded.histories;
  key.top = bucket.padded.top;
  return key;
}

StepGraphs::Step* StepGraphs::Find(const StepSizes& key) {
  const auto found =
      std::find_if(steps_.begin(), steps_.end(),
                   [&](const Step& step) { return step.key == key; });
  if (found != steps_.end()) {
    steps_.splice(steps_.begin(), steps_, found);
    return &steps_.front();
  }
  if (steps_.size() == kMost) steps_.pop_back();
  steps_.emplace_front().key = key;
  return &steps_.front();
}

void StepGraphs::UseBlob(int64_t peaks) {
  if (std::exchange(peaks_, peaks) != peaks) steps_.clear();
}

}  // namespace kvasir::worker
