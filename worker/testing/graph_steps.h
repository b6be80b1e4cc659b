// Test support: a small model's steps as they come to graphs. Batches grow and
// shrink, sequences end, contexts cross pages, prompts and copies of pages come
// between, and samples ask for more than they did before.
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
  std::string plan;  // a preset
  bool graphs = true;
  bool deterministic = false;
  int64_t max_model_len = 64;
  std::function<std::unique_ptr<kernels::Device>()> make_device;
  Collective* collective = nullptr;
};
absl::StatusOr<std::unique_ptr<Rank>> MakeGraphRank(const GraphRank& options);

// Of every step what it gave, to the bit; `behind` is called behind each. The
// first kFewGraphSteps capture one of them and replay three.
// Captures kGraphCaptures of them and replays kGraphReplays, two of those that
// are captured among them once more, behind a step whose blob outgrew its
// memory.
inline constexpr int64_t kGraphCaptures = 7;
inline constexpr int64_t kGraphReplays = 13;
inline constexpr size_t kAllGraphSteps = 100;
inline constexpr size_t kFewGraphSteps = 6;
absl::StatusOr<std::vector<std::string>> RunGraphSteps(
    Rank& rank, const std::function<void()>& behind = nullptr,
    size_t most_steps = kAllGraphSteps);

}  // namespace kvasir::worker
