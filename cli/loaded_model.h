// A model ready to run steps on this machine: weights, cache arenas, executor.
// What serve, worker, perplexity and the benchmarks have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "cache/kv_cache.h"
#include "cache/layout.h"
#include "cli/model_source.h"
#include "cli/options.h"
#include "kernels/allocator.h"
#include "kernels/stream.h"
#include "worker/collective.h"
#include "worker/model_executor.h"

namespace kvasir::cli {

struct LoadRequest {
  ModelOptions model;
  // 0: the model's own limit.
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
  // 0: what max_num_seqs sequences of max_model_len need, at most half of the
  // memory that is left after the weights.
  int64_t kv_cache_bytes = 0;
  bool prefix_reuse = true;
  // Bytes of weights packed so far and in all.
  std::function<void(int64_t done, int64_t total)> progress;
};

// Owns: everything that a step needs.
// Threads: creation and execution by one thread at a time.
// Errors: those of each part, with the flag to change where one would help.
class LoadedModel {
 public:
  static absl::StatusOr<std::unique_ptr<LoadedModel>> Load(
      const LoadRequest& request);

  const ModelSource& source() const { return source_; }
  const cache::PageLayout& layout() const { return *layout_; }
  const cache::PageCounts& pages() const { return pages_; }
  const std::string& cache_id() const { return cache_id_; }
  int64_t max_model_len() const { return max_model_len_; }
  worker::ModelExecutor& executor() { return *executor_; }
  cache::KvCache& cache() { return *cache_; }
  kernels::CpuStream& stream() { return *stream_; }
  base::ThreadPool& pool() { return *pool_; }
  int num_threads() const { return pool_->num_threads(); }
  const std::string& weights_id() const { return executor_->weights_id(); }

  // From the allocator's counters.
  int64_t weight_bytes() const;
  int64_t kv_pool_bytes() const;
  int64_t workspace_bytes() const;

 private:
  LoadedModel() = default;
  absl::Status ChooseLength(int64_t max_model_len);
  absl::Status PlanPages(const LoadRequest& request);

  ModelSource source_;
  int64_t max_model_len_ = 0;
  std::unique_ptr<base::ThreadPool> pool_;
  std::unique_ptr<kernels::DeviceAllocator> allocator_;
  std::unique_ptr<kernels::CpuStream> stream_;
  std::unique_ptr<worker::Collective> collective_;
  std::unique_ptr<cache::PageLayout> layout_;
  cache::PageCounts pages_;
  std::string cache_id_;
  std::unique_ptr<worker::ModelExecutor> executor_;
  std::unique_ptr<cache::KvCache> cache_;
};

}  // namespace kvasir::cli
