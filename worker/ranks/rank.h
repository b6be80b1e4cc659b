// Builds everything that one rank needs to run a model, in the right order:
// layout, page counts, threads, memory, weights, executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
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
#include "worker/ranks/plan_check.h"
#include "worker/ranks/text_run.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// The offer that a rank makes to its group once its weights are loaded.
struct RankOffer {
  cache::PageCounts pages;  // the most pages that fit on this rank
  cache::PageCounts host_pages;
  std::string weight_tiles;  // input of model::CombineWeightTiles
  int64_t weight_bytes = 0;
};
// The values that all ranks of a group use, computed from the offers of all
// ranks.
struct RankAgreement {
  cache::PageCounts pages;  // for each page group, the smallest offer
  cache::PageCounts host_pages;
  std::string weights_id;  // computed from the tiles of all ranks
  std::string cache_id;    // empty: every rank computes it from the weights_id
};

struct PoolBytes {
  int64_t pool = 0;
  int64_t host_pool = 0;
};

struct RankOptions {
  int num_threads = 1;
  kernels::CpuBackend backend = kernels::CpuBackend::kSimd;
  // Makes the rank's device. Null: the device is a CPU with `backend`. `pool`
  // outlives the device.
  std::function<std::unique_ptr<kernels::Device>(base::ThreadPool* pool,
                                                 kernels::CpuBackend backend,
                                                 int64_t memory_limit_bytes)>
      make_device;
  int64_t page_tokens = 64;
  // Bytes of the page pool on this rank, all page groups together. Ignored if
  // `pages` is not empty.
  int64_t kv_cache_bytes = 0;
  cache::PageCounts pages;
  // The share of the device's memory that the rank may use; 0: no such limit.
  // Can be set only for a device with its own memory, and only if `pages` is
  // empty. Weights, workspace and the largest step take their memory from this
  // share. The page pool gets the rest, but at most kv_cache_bytes.
  double memory_utilization = 0;
  // Matters only if memory_utilization leaves less than kv_cache_bytes. True:
  // Create fails. False: the pool is smaller.
  bool kv_cache_exact = false;
  // The size of the host pool, which keeps the pages of preempted sequences: in
  // bytes, or as page counts. If neither is set, there is no host pool.
  int64_t host_pool_bytes = 0;
  cache::PageCounts host_pages;
  // If set, it gives the sizes of both pools in place of kv_cache_bytes and
  // host_pool_bytes. Called before any weight is read, and again if plan_check
  // has chosen another plan.
  std::function<absl::StatusOr<PoolBytes>(const plan::ResolvedPlan& plan,
                                          const cache::PageLayout& layout)>
      choose_pools;
  // Limit of all memory that the rank allocates on the device; 0: no limit.
  int64_t memory_limit_bytes = 0;
  ModelExecutorOptions executor;
  // True: results have the same bits whatever prefixes are cached. On a CPU,
  // the Create that takes a KvPlan then never lifts the latents of prompts
  // (prompt_lift.h), even if that would be cheaper; for a ServedPlan,
  // ServeOptions::lift_prompts decides. On a GPU, which never lifts
  // latents, this flag selects PagedAttentionParams::prompts_as_rows.
  bool deterministic = false;
  // If not empty, the rank measures the means of keys with the first
  // kKeyMeanTokens of these tokens, and the cache leaves them out of quantized
  // keys (key_means.h). All ranks of a group must have the same tokens.
  std::vector<int32_t> key_mean_tokens;
  // If set, the plan is compared with a dense cache before the pools are
  // allocated, and another plan may be served in its place. All ranks of a
  // group must have the same request.
  std::optional<PlanCheckRequest> plan_check;
  // Called once, after the weights are loaded, to agree on the pages. It must
  // block until all ranks have made their offers, and return the result. Null
  // in a group of one rank.
  std::function<absl::StatusOr<RankAgreement>(const RankOffer&)> agree;
  // Called with the progress of loading the weights. May be null.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Whether the device supports lifting the latents of prompts (prompt_lift.h).
// False for a GPU.
bool PromptsMayLift(const kernels::Device& device);

// Memory sizes that CheckPoolFitsMemory compares.
struct PoolMemory {
  int64_t pool_bytes = 0;
  int64_t host_pool_bytes = 0;
  int64_t weight_bytes = 0;
  int64_t kept_bytes = 0;  // attention weights kept for evictions
  // Memory available to the process (MachineLimits), measured before weights
  // and pools were allocated.
  int64_t available_bytes = 0;
};

// Checks that the pools fit into memory beside the weights and the kept
// attention weights. If they do not, returns RESOURCE_EXHAUSTED with the sizes
// and the flag to change. Without this check the system would kill the process
// when it touches all memory of the pools at the start.
absl::Status CheckPoolFitsMemory(const PoolMemory& memory);

// Returns the cache::CacheId of a model with these weights.
// `key_bias_left_out` is ServedPlan::leaves_key_bias_out. `key_means` is the
// KeyMeansId of the means that the cache leaves out, or empty.
std::string CacheIdOf(const kvasir::v1::KvPlan& plan,
                      const model::DecoderSpec& spec, int64_t page_tokens,
                      const std::string& weights_id, bool key_bias_left_out,
                      const std::string& key_means);

// Everything that one rank needs to run a model.
//
// Owns: everything that it builds.
// Threads: Create is called by one thread; after that see ModelExecutor.
// Errors: Create returns, among others, before it reads weights:
//   FAILED_PRECONDITION with the sizes if the pool is too small for one
//   sequence of max_model_len tokens, and UNIMPLEMENTED with the op's name
//   if the device lacks a kernel. After it has read the weights, it returns
//   RESOURCE_EXHAUSTED with the sizes if memory_utilization leaves too
//   little memory for one sequence. Also the errors of RankOptions::agree
//   and of PlanComparison.
class Rank {
 public:
  // `collective` must outlive the rank. If it is null, the group has one rank.
  static absl::StatusOr<std::unique_ptr<Rank>> Create(
      const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
      WeightSource* source, const RankOptions& options,
      Collective* collective = nullptr);
  // Like the other Create, but first resolves and checks the plan.
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
  // Whether the cache leaves out the means of keys.
  bool leaves_key_means_out() const {
    return !key_means_.empty() && plan_->can_leave_key_means_out();
  }
  // The bytes of weights that were read (ModelWeights::read_bytes).
  int64_t read_bytes() const { return read_bytes_; }
  const std::shared_ptr<const ServedPlan>& served_plan() const { return plan_; }
  // The results of RankOptions::plan_check. The last one is that of the served
  // plan. Empty if plan_check is not set.
  const std::vector<PlanCheck>& plan_checks() const { return plan_checks_; }

 private:
  explicit Rank(model::DecoderSpec spec);

  // Creates the rank with its threads and its device.
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
  // Returns UNIMPLEMENTED with the op's name if the device lacks an op that
  // steps launch. `with_means`: whether the cache leaves out the means of keys,
  // which needs more ops. Reads no weights.
  absl::Status CheckOps(WeightSource* source, const RankOptions& options,
                        bool with_means, Collective* collective);
  // Sets the plan to serve and its layout.
  absl::Status UsePlan(std::shared_ptr<const ServedPlan> plan,
                       const RankOptions& options);
  // Sets the numbers of pages for this plan. FAILED_PRECONDITION if they are
  // too few for one sequence.
  absl::Status SizePools(const RankOptions& options);
  // Returns the cache_id of a plan with this rank's weights.
  std::string CacheIdOfPlan(const ServedPlan& plan,
                            const std::string& weights_id,
                            const RankOptions& options) const;
  // Measures the means of keys if a plan can leave them out.
  absl::Status MeasureMeans(
      absl::Span<const std::shared_ptr<const ServedPlan>> plans,
      const TextRank& text_rank, ModelWeights* weights);
  // Removes the plans for which the device lacks ops, and adds a result to
  // plan_checks_ for each of them. Returns the error of CheckOps for the last
  // plan if that plan is removed.
  absl::Status RemoveUnsupported(
      WeightSource* source, const RankOptions& options, Collective* collective,
      std::vector<std::shared_ptr<const ServedPlan>>* plans);
  // Compares the plans in turn with a dense cache, until the divergence of one
  // is small enough, and uses this plan.
  absl::Status ChoosePlan(
      absl::Span<const std::shared_ptr<const ServedPlan>> plans,
      const std::string& weight_tiles, const TextRank& text_rank,
      const RankOptions& options, ModelWeights* weights);
  // Calls options.agree with this rank's offer, and adopts the result.
  // FAILED_PRECONDITION if this rank lacks room for the agreed pages or has
  // another cache_id.
  absl::Status Agree(std::string weight_tiles, const RankOptions& options);
  // Chooses the pool's size by options.memory_utilization, and makes the
  // executor with that pool.
  absl::Status MeasurePages(ModelWeights weights, const RankOptions& options,
                            Collective* collective);

  // The order of members matters: they are destroyed in reverse order, and
  // later ones use earlier ones.
  const model::DecoderSpec spec_;
  std::shared_ptr<const ServedPlan> plan_;
  SingleRank single_rank_;
  std::shared_ptr<const cache::PageLayout> layout_;
  cache::PageCounts pages_;
  cache::PageCounts host_pages_;
  int64_t read_bytes_ = 0;
  std::vector<PlanCheck> plan_checks_;
  PoolBytes pool_bytes_;
  // The tokens with which means are measured; empty if they are not.
  std::vector<int32_t> key_mean_tokens_;
  std::string key_means_;  // the KeyMeansId of the weights' means, or empty
  std::string weights_id_;
  std::string cache_id_;
  std::unique_ptr<base::ThreadPool> pool_;
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<ModelExecutor> executor_;
};

}  // namespace kvasir::worker
