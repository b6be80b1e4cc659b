// Everything that one rank needs to run a model, put together in the right
// order: layout, page counts, threads, memory, weights, executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "cache/layout/layout.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/decoder_spec.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/collective/collective.h"
#include "worker/executor/model_executor.h"
#include "worker/program/served_plan.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// What a rank has for its group once its weights are loaded.
struct RankOffer {
  cache::PageCounts pages;  // that fit here
  cache::PageCounts host_pages;
  std::string weight_tiles;  // model::CombineWeightTiles's
  int64_t weight_bytes = 0;
};
// What the whole group has.
struct RankAgreement {
  cache::PageCounts pages;  // the least that any rank offers
  cache::PageCounts host_pages;
  std::string weights_id;  // of all ranks' tiles together
  std::string cache_id;    // empty: every rank makes its own of the weights_id
};

struct RankOptions {
  int num_threads = 1;
  kernels::CpuBackend backend = kernels::CpuBackend::kSimd;
  // Instead of the CPU with this back end: the rank's device. `pool` outlives
  // it.
  std::function<std::unique_ptr<kernels::Device>(base::ThreadPool* pool,
                                                 kernels::CpuBackend backend,
                                                 int64_t memory_limit_bytes)>
      make_device;
  int64_t page_tokens = 64;
  // Of the plan in pages of page_tokens; null: it is laid out here.
  std::shared_ptr<const cache::PageLayout> layout;
  // Bytes of the page pool on this rank, all page groups together; not used
  // when `pages` is given.
  int64_t kv_cache_bytes = 0;
  cache::PageCounts pages;
  // Of a device with memory of its own, above 0: the pool is what is left of
  // that share of it, but kv_cache_bytes at most, once weights, workspace and a
  // step have taken theirs (MeasurePages). `pages` are not given then.
  double memory_utilization = 0;
  // Or kv_cache_bytes, where that share does not leave them, are refused.
  bool kv_cache_exact = false;
  // The same of the host pool, where sequences wait as images; 0 and empty:
  // there is none.
  int64_t host_pool_bytes = 0;
  cache::PageCounts host_pages;
  // All device memory together; 0: no limit.
  int64_t memory_limit_bytes = 0;
  ModelExecutorOptions executor;
  // Prompts lift nothing, even where that would be cheaper: results have the
  // same bits whatever the prefix index holds (prompt_lift.h). Of a plan that
  // Create resolves; else ServePlan was told. On a GPU they never do, and
  // attend with the bits of their rows alone
  // (kernels::PagedAttentionParams::prompts_as_rows).
  bool deterministic = false;
  // Called once, before the pools have their pages: until all ranks have
  // offered. Null in a group of one.
  std::function<absl::StatusOr<RankAgreement>(const RankOffer&)> agree;
  // Of loading the weights.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Whether prompts may lift latents on the device: kernels for a GPU do not.
bool PromptsMayLift(const kernels::Device& device);

// Whether the pools fit beside the weights, and beside what decode keeps where
// the plan evicts by scores.
struct PoolMemory {
  int64_t pool_bytes = 0;
  int64_t host_pool_bytes = 0;
  int64_t weight_bytes = 0;
  int64_t kept_bytes = 0;       // KeptWeightBytes of the pool
  int64_t available_bytes = 0;  // MachineLimits's, before either is there
};

// RESOURCE_EXHAUSTED with the numbers and the flag when they do not: the pools
// are touched at start, and more than there is would have the system kill the
// process.
absl::Status CheckPoolFitsMemory(const PoolMemory& memory);

// cache::CacheId of a model with these weights.
std::string CacheIdOf(const kvasir::v1::KvPlan& plan,
                      const model::DecoderSpec& spec, int64_t page_tokens,
                      const std::string& weights_id);

// Owns: all of the above.
// Threads: constructed by one thread; then as ModelExecutor.
// Errors: before any weight is read: FAILED_PRECONDITION with the numbers when
//   the pool does not hold one sequence of max_model_len tokens, UNIMPLEMENTED
//   by an op's name when the device has no kernel for it. RESOURCE_EXHAUSTED
//   with the numbers where memory_utilization leaves less than one sequence.
//   RankOptions::agree's.
class Rank {
 public:
  // `collective` null: a group of one; else it outlives the rank.
  static absl::StatusOr<std::unique_ptr<Rank>> Create(
      const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
      WeightSource* source, const RankOptions& options,
      Collective* collective = nullptr);
  // Of a plan that is resolved for it.
  static absl::StatusOr<std::unique_ptr<Rank>> Create(
      const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
      WeightSource* source, const RankOptions& options,
      Collective* collective = nullptr);
  ~Rank();

  ModelExecutor& executor() { return *executor_; }
  const model::DecoderSpec& spec() const { return spec_; }
  const plan::ResolvedPlan& plan() const { return *plan_->resolved; }
  const cache::PageLayout& layout() const { return *layout_; }
  const cache::PageCounts& pages() const { return pages_; }
  const cache::PageCounts& host_pages() const { return host_pages_; }
  const kernels::DeviceAllocator& allocator() const {
    return device_->allocator();
  }
  kernels::Device& device() const { return *device_; }
  const kernels::Stream& stream() const { return *stream_; }
  base::ThreadPool& pool() const { return *pool_; }
  const std::string& weights_id() const { return weights_id_; }
  const std::string& cache_id() const { return cache_id_; }
  // ModelWeights::read_bytes.
  int64_t read_bytes() const { return read_bytes_; }

 private:
  explicit Rank(const model::DecoderSpec& spec);

  // Threads and device.
  static absl::StatusOr<std::unique_ptr<Rank>> Start(
      const model::DecoderSpec& spec, const RankOptions& options,
      Collective* collective);
  absl::Status Load(std::shared_ptr<const ServedPlan> plan,
                    WeightSource* source, const RankOptions& options,
                    Collective* collective);
  cache::PageCounts PagesFor(int64_t bytes, const RankOptions& options) const;
  cache::PageCounts LeastPages(const RankOptions& options) const;
  absl::Status MakeExecutor(ModelWeights weights, const RankOptions& options,
                            Collective* collective);
  // UNIMPLEMENTED by the name of an op that steps will launch and the device
  // does not have, before a weight is read.
  absl::Status CheckOps(WeightSource* source, const RankOptions& options,
                        Collective* collective);
  // Takes what the group agrees on. FAILED_PRECONDITION for what this rank
  // cannot agree to.
  absl::Status Agree(std::string weight_tiles, const RankOptions& options);
  // The pool by options.memory_utilization, and the executor with it.
  absl::Status MeasurePages(ModelWeights weights, const RankOptions& options,
                            Collective* collective);

  // Destroyed in the reverse order.
  const model::DecoderSpec spec_;
  std::shared_ptr<const ServedPlan> plan_;
  SingleRank single_rank_;
  std::shared_ptr<const cache::PageLayout> layout_;
  cache::PageCounts pages_;
  cache::PageCounts host_pages_;
  int64_t read_bytes_ = 0;
  std::string weights_id_;
  std::string cache_id_;
  std::unique_ptr<base::ThreadPool> pool_;
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<ModelExecutor> executor_;
};

}  // namespace kvasir::worker
