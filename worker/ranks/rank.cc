#include "worker/ranks/rank.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/cache_id.h"

namespace kvasir::worker {

absl::Status CheckPoolFitsMemory(const PoolMemory& memory) {
  const int64_t left =
      std::max(int64_t{0}, memory.available_bytes - memory.weight_bytes -
                               memory.kept_bytes);
  std::string taken = absl::StrCat(memory.weight_bytes);
  if (memory.kept_bytes > 0) {
    absl::StrAppend(&taken, ", attention kept for evictions ",
                    memory.kept_bytes);
  }
  if (memory.pool_bytes <= left &&
      memory.host_pool_bytes <= left - memory.pool_bytes) {
    return absl::OkStatus();
  }
  if (memory.pool_bytes <= left) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a host pool of ", memory.host_pool_bytes, " bytes does not fit: of ",
        memory.available_bytes, " bytes available the weights take ", taken,
        " and the KV cache ", memory.pool_bytes,
        "; lower --host-pool-bytes to at most ", left - memory.pool_bytes));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "a KV cache of ", memory.pool_bytes, " bytes does not fit: of ",
      memory.available_bytes, " bytes available the weights take ", taken,
      "; lower --kv-cache-bytes to at most ", left));
}

std::string CacheIdOf(const kvasir::v1::KvPlan& plan,
                      const model::DecoderSpec& spec, int64_t page_tokens,
                      const std::string& weights_id) {
  return cache::CacheId(
      plan, {.shape = model::AttentionShapeOf(spec),
             .page_tokens = page_tokens,
             .rope = {.interleaved =
                          spec.rope.pairing == model::RopePairing::kInterleaved,
                      .frequencies = spec.rope.frequencies,
                      .attention_factor = spec.rope.attention_factor},
             .tensor_fingerprint = weights_id});
}

Rank::Rank(const model::DecoderSpec& spec,
           std::shared_ptr<const ServedPlan> plan)
    : spec_(spec), plan_(std::move(plan)) {}

Rank::~Rank() = default;

absl::StatusOr<std::unique_ptr<Rank>> Rank::Create(
    const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
    WeightSource* source, const RankOptions& options, Collective* collective) {
  plan::TpShard shard;
  if (collective != nullptr) shard = collective->shard();
  KVASIR_RETURN_IF_ERROR(ShardSizes::Create(spec, shard).status());
  KVASIR_ASSIGN_OR_RETURN(
      std::shared_ptr<const ServedPlan> served,
      ServePlan(plan, model::AttentionShapeOf(spec),
                {.lift_prompts = !options.deterministic}, shard));
  return Create(spec, std::move(served), source, options, collective);
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Create(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const RankOptions& options, Collective* collective) {
  const std::shared_ptr<const plan::ResolvedPlan> resolved = plan->resolved;
  std::unique_ptr<Rank> rank(new Rank(spec, plan));
  if (collective == nullptr) collective = &rank->single_rank_;
  KVASIR_RETURN_IF_ERROR(
      ShardSizes::Create(spec, collective->shard()).status());
  const ModelExecutorOptions& limits = options.executor;
  if (options.memory_limit_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory limit of ", options.memory_limit_bytes, " bytes"));
  }
  rank->pool_ = std::make_unique<base::ThreadPool>(options.num_threads);
  rank->device_ =
      options.make_device
          ? options.make_device(rank->pool_.get(), options.backend,
                                options.memory_limit_bytes)
          : std::make_unique<kernels::CpuDevice>(
                rank->pool_.get(), options.backend, options.memory_limit_bytes);
  rank->layout_ = options.layout;
  if (rank->layout_ == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(
        cache::PageLayout layout,
        cache::PageLayout::Create(
            *resolved, {.page_tokens = options.page_tokens,
                        .granule_bytes = rank->device_->page_granule_bytes()}));
    rank->layout_ = std::make_shared<cache::PageLayout>(std::move(layout));
  }
  if (rank->layout_->granule_bytes() != rank->device_->page_granule_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pages with granules of ", rank->layout_->granule_bytes(),
        " bytes on a device that wants ", rank->device_->page_granule_bytes()));
  }
  const auto pages_for = [&](int64_t bytes) {
    return rank->layout_->PagesForBudget(
        {.budget_bytes = bytes,
         .max_model_len = limits.max_model_len,
         .max_chunk_tokens = limits.max_batched_tokens});
  };
  rank->pages_ = options.pages;
  if (rank->pages_.empty()) rank->pages_ = pages_for(options.kv_cache_bytes);
  rank->host_pages_ = options.host_pages;
  if (rank->host_pages_.empty()) {
    rank->host_pages_ = pages_for(options.host_pool_bytes);
  }
  KVASIR_RETURN_IF_ERROR(rank->layout_->OneSequenceFits(
      rank->pages_, limits.max_model_len, limits.max_batched_tokens));

  rank->stream_ = rank->device_->MakeStream();
  KVASIR_ASSIGN_OR_RETURN(
      ModelWeights weights,
      LoadWeights(spec, plan, source, rank->device_.get(),
                  {.pool = rank->pool_.get(), .progress = options.progress}));
  rank->cache_id_ = CacheIdOf(resolved->source, spec, options.page_tokens,
                              weights.weights_id);
  KVASIR_ASSIGN_OR_RETURN(
      rank->executor_, ModelExecutor::Create({.spec = &rank->spec_,
                                              .plan = resolved.get(),
                                              .layout = rank->layout_.get(),
                                              .pages = rank->pages_,
                                              .host_pages = rank->host_pages_,
                                              .device = rank->device_.get(),
                                              .stream = rank->stream_.get(),
                                              .collective = collective},
                                             std::move(weights), limits));
  return rank;
}

int64_t Rank::kv_fixed_bytes_per_sequence() const {
  int64_t bytes = 0;
  for (const cache::PageGroupLayout& group : layout_->page_groups()) {
    bytes += group.side_pages_per_sequence *
             executor_->arenas().page_bytes(group.id.value());
  }
  return bytes;
}

double Rank::kv_compression_ratio() const {
  return static_cast<double>(layout_->dense_bf16_bytes_per_token()) /
         executor_->kv_bytes_per_token();
}

}  // namespace kvasir::worker
