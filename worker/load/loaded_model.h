// Loads a model so that it can run steps on this machine: weights, cache arenas
// and executor. Used by the commands serve, worker and perplexity and by the
// benchmarks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/kv_cache.h"
#include "cache/layout/layout.h"
#include "model/tokenizer/tokenizer.h"
#include "worker/load/device.h"
#include "worker/load/membership.h"
#include "worker/load/model_options.h"
#include "worker/load/model_source.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

struct LoadRequest {
  ModelOptions model;
  // The most tokens of a sequence; 0: the model's own limit.
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
  // Size of the page pool. 0: as much as max_num_seqs sequences of
  // max_model_len need, up to a limit. On the CPU, the limit is half of the
  // memory that the weights leave. On a GPU, it is what gpu_memory_utilization
  // leaves, as measured after a step.
  int64_t kv_cache_bytes = 0;
  // The share of a GPU's memory that all processes together may use.
  double gpu_memory_utilization = 0.9;
  // Size of the host pool, which keeps the pages of preempted sequences. If not
  // given, it is a quarter of the page pool's size, but at most half of the
  // memory that the page pool leaves. It is 0 if the page pool has room for
  // max_num_seqs sequences of max_model_len, because then no sequence is
  // preempted for its pages.
  std::optional<int64_t> host_pool_bytes = 0;
  bool graphs = false;  // see ModelExecutorOptions::graphs
  // Encodes the text with which the means of keys are measured
  // (RankOptions::key_mean_tokens). If null, Load reads the model's tokenizer.
  const model::Tokenizer* tokenizer = nullptr;
  bool prefix_reuse = true;
  // RankOptions::plan_check, which must be equal on all ranks of a group. Leave
  // its member `instead` empty: Load sets that member if choose_plan is true.
  std::optional<worker::PlanCheckRequest> plan_check;
  // If true, measures the named plans that any checkpoint can use. Serves the
  // plan with the fewest bytes per token among those whose divergence is at
  // most plan_check->most_kl. If there is none, or if the checkpoint has a plan
  // of its own, serves the plan of `model`.
  bool choose_plan = false;
  // If set, used instead of the plan that `model` names. For benchmarks.
  std::optional<kvasir::v1::KvPlan> plan;
  // Whether, with random weights, to raise the shape's number of positions to
  // max_model_len. Has no effect if positions are learned.
  bool stretch_positions = false;
  // See ModelExecutorOptions::profile.
  worker::StepProfile* profile = nullptr;
  // The group of ranks to join; null to load the whole model. Must outlive the
  // loaded model.
  Membership* group = nullptr;
  // Called with the opened model before any weight is read; an error ends the
  // load.
  std::function<absl::Status(const ModelSource& source)> check;
  // Called with the bytes of weights packed so far and the total.
  std::function<void(int64_t done, int64_t total)> progress;
  OpenCuda open_cuda = &kernels::MakeCudaDevice;
};

// Owns: everything that a step needs.
// Threads: one at a time may load the model and run steps.
// Errors: those of the parts that it loads. If changing a flag would help, they
//   name the flag.
class LoadedModel {
 public:
  static absl::StatusOr<std::unique_ptr<LoadedModel>> Load(
      const LoadRequest& request);

  const ModelSource& source() const { return source_; }
  worker::Rank& rank() const { return *rank_; }
  const cache::PageLayout& layout() const { return rank_->layout(); }
  const cache::PageCounts& pages() const { return rank_->pages(); }
  int64_t total_pages() const;
  int64_t max_model_len() const { return max_model_len_; }
  int num_threads() const { return num_threads_; }
  cache::KvCache& cache() { return *cache_; }

  // Bytes of cache per token. kv_compression_ratio is the bytes per token of a
  // dense bf16 cache, divided by kv_bytes_per_token.
  double kv_bytes_per_token() const {
    return rank_->executor().kv_bytes_per_token();
  }
  double kv_compression_ratio() const {
    return rank_->executor().kv_compression_ratio();
  }
  // Allocated bytes, as the allocator counts them.
  int64_t weight_bytes() const;
  int64_t kv_pool_bytes() const;
  int64_t host_pool_bytes() const;
  int64_t workspace_bytes() const;

 private:
  LoadedModel() = default;
  absl::Status ChooseLength(int64_t max_model_len);
  // Loads the model on `device`; null means the CPU.
  absl::Status LoadOn(std::unique_ptr<kernels::Device> device,
                      const LoadRequest& request);
  // Joins `request.group` and waits until all ranks have joined.
  absl::StatusOr<worker::Collective*> JoinGroup(
      const LoadRequest& request, const std::vector<int32_t>& key_mean_tokens,
      const kernels::Device* device) const;
  // The memory that is available for weights and pools, before either is
  // allocated.
  struct Room {
    int64_t available_bytes = 0;
    // The host memory available for a host pool. Set only if the device has its
    // own memory.
    std::optional<int64_t> host_available_bytes;
  };
  static absl::StatusOr<Room> RoomOn(const kernels::Device* device,
                                     double utilization, LocalShare local);
  // Chooses the sizes of page pool and host pool for a plan. `weight_bytes` is
  // the memory that the weights will take.
  absl::StatusOr<worker::PoolBytes> ChoosePoolBytes(
      const LoadRequest& request, const Room& room,
      const plan::ResolvedPlan& plan, const cache::PageLayout& layout,
      int64_t weight_bytes) const;

  ModelSource source_;
  int64_t max_model_len_ = 0;
  int num_threads_ = 0;
  std::unique_ptr<worker::Rank> rank_;
  std::unique_ptr<cache::KvCache> cache_;
};

}  // namespace kvasir::cli
