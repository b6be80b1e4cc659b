// Test support: steps of a small model that exercise captured graphs. Batches
// grow and shrink, contexts grow into new pages, and some steps have prompts or
// page copies. Later samples have other settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/ranks/rank.h"

namespace kvasir::worker {

struct GraphRank {
  std::string plan;  // the name of a preset
  bool graphs = true;
  bool deterministic = false;
  int64_t max_model_len = 64;
  std::function<std::unique_ptr<kernels::Device>()> make_device;
  Collective* collective = nullptr;
};
absl::StatusOr<std::unique_ptr<Rank>> MakeGraphRank(const GraphRank& options);

// Runs the steps, at most `most_steps`, and returns the serialized result of
// each. Calls `after_step` after each step. The first kFewGraphSteps steps make
// one capture and three replays. All steps make kGraphCaptures captures and
// kGraphReplays replays. Some sizes are captured twice, because the buffer for
// uploads moves in between, which discards all graphs.
inline constexpr int64_t kGraphCaptures = 7;
inline constexpr int64_t kGraphReplays = 13;
inline constexpr size_t kAllGraphSteps = 100;
inline constexpr size_t kFewGraphSteps = 6;
absl::StatusOr<std::vector<std::string>> RunGraphSteps(
    Rank& rank, const std::function<void()>& after_step = nullptr,
    size_t most_steps = kAllGraphSteps);

}  // namespace kvasir::worker
