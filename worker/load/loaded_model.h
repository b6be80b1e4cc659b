// A model ready to run steps on this machine: weights, cache arenas, executor.
// What serve, worker, perplexity and the benchmarks have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "cache/kv_cache.h"
#include "cache/layout/layout.h"
#include "worker/load/device.h"
#include "worker/load/membership.h"
#include "worker/load/model_options.h"
#include "worker/load/model_source.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

struct LoadRequest {
  ModelOptions model;
  // 0: the model's own limit.
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
  // 0: what max_num_seqs sequences of max_model_len need, at most half of the
  // memory that is left after the weights; on a GPU at most what is left of
  // gpu_memory_utilization once it is measured.
  int64_t kv_cache_bytes = 0;
  // The share of a GPU's memory that may be taken in all, by whomever.
  double gpu_memory_utilization = 0.9;
  // Empty: a quarter of the pool, at most half of what it leaves; none where
  // max_num_seqs sequences of max_model_len fit the pool, for then none is ever
  // preempted for its pages.
  std::optional<int64_t> host_pool_bytes = 0;
  bool graphs = false;  // ModelExecutorOptions'
  bool prefix_reuse = true;
  // In place of the options' plan: a benchmark's own.
  std::optional<kvasir::v1::KvPlan> plan;
  // With random weights: raise the shape's positions to max_model_len, but for
  // learned ones.
  bool stretch_positions = false;
  // ModelExecutorOptions'.
  worker::StepProfile* profile = nullptr;
  // Null: the whole model. Outlives it.
  Membership* group = nullptr;
  // Hears of what is going to be run before a weight is read, and may refuse
  // it.
  std::function<absl::Status(const ModelSource& source)> check;
  // Bytes of weights packed so far and in all.
  std::function<void(int64_t done, int64_t total)> progress;
  OpenCuda open_cuda = &kernels::MakeCudaDevice;
};

// Owns: everything that a step needs.
// Threads: creation and execution by one thread at a time.
// Errors: those of each part, with the flag to change where one would help.
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

  // Of the arenas, and a dense bf16 cache's bytes over it.
  double kv_bytes_per_token() const {
    return rank_->executor().kv_bytes_per_token();
  }
  double kv_compression_ratio() const {
    return rank_->executor().kv_compression_ratio();
  }
  // From the allocator's counters.
  int64_t weight_bytes() const;
  int64_t kv_pool_bytes() const;
  int64_t host_pool_bytes() const;
  int64_t workspace_bytes() const;

 private:
  LoadedModel() = default;
  absl::Status ChooseLength(int64_t max_model_len);
  // Null: the CPU.
  absl::Status LoadOn(std::unique_ptr<kernels::Device> device,
                      const LoadRequest& request);
  // Until all ranks have come.
  absl::StatusOr<worker::Collective*> JoinGroup(
      const LoadRequest& request, const kernels::Device* device) const;
  // For weights and pools, before either is there.
  struct Room {
    int64_t available_bytes = 0;
    // Of a host pool, where it lies elsewhere.
    std::optional<int64_t> host_available_bytes;
  };
  static absl::StatusOr<Room> RoomOn(const kernels::Device* device,
                                     double utilization, LocalShare local);
  struct PoolBytes {
    int64_t pool = 0;
    int64_t host_pool = 0;
  };
  // `weight_bytes`: that will be held.
  absl::StatusOr<PoolBytes> ChoosePoolBytes(const LoadRequest& request,
                                            const Room& room,
                                            const cache::PageLayout& layout,
                                            int64_t weight_bytes) const;

  ModelSource source_;
  int64_t max_model_len_ = 0;
  int num_threads_ = 0;
  std::unique_ptr<worker::Rank> rank_;
  std::unique_ptr<cache::KvCache> cache_;
};

}  // namespace kvasir::cli
