#include "cli/loaded_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/sequence_pages.h"
#include "cli/device/device.h"
#include "cli/units.h"
#include "worker/weights/weight_source.h"

namespace kvasir::cli {
namespace {

// `source` outlives it.
absl::StatusOr<std::unique_ptr<worker::WeightSource>> OpenWeights(
    const ModelSource& source, uint64_t seed) {
  if (source.checkpoint.has_value()) {
    return std::make_unique<worker::CheckpointSource>(&*source.checkpoint);
  }
  return worker::RandomSource::Create(*source.shape, source.spec, *source.plan,
                                      seed, kernels::DType::kBf16);
}

}  // namespace

absl::Status LoadedModel::ChooseLength(int64_t max_model_len) {
  const int64_t own = source_.spec.max_position_embeddings;
  if (max_model_len > own) {
    // An endless text is one where few of its tokens stay.
    int64_t held = 0;
    for (const plan::ResolvedPageGroup& group : source_.plan->page_groups) {
      held =
          std::max(held, group.eviction.evicts()
                             ? cache::MostSlots(group.eviction, max_model_len)
                             : max_model_len);
    }
    const auto refuse = [&](const auto&... why) {
      return absl::InvalidArgumentError(
          absl::StrCat("--max-model-len ", max_model_len, " is more than the ",
                       own, " positions of ", source_.name, why...));
    };
    if (source_.spec.learned_positions) {
      return refuse(", which it has learned one by one");
    }
    if (held == max_model_len) return refuse();
    if (held > own)
      return refuse(", and so are the ", held, " slots that stay");
    if (max_model_len > cache::kMaxSequenceTokens) {
      return refuse(", and than any length that is served, ",
                    cache::kMaxSequenceTokens);
    }
  }
  max_model_len_ = max_model_len > 0 ? max_model_len : own;
  return absl::OkStatus();
}

absl::StatusOr<LoadedModel::PoolBytes> LoadedModel::ChoosePoolBytes(
    const LoadRequest& request, const cache::PageLayout& layout,
    int64_t weight_bytes) const {
  const int64_t available = base::ReadMachineLimits().available_bytes;
  const int64_t left = std::max(int64_t{0}, available - weight_bytes);
  const int64_t one =
      layout.BytesAtLength(max_model_len_, request.max_batched_tokens);
  // Compared by division: the product may not fit into 64 bits.
  const auto holds_all = [&](int64_t bytes) {
    return bytes / request.max_num_seqs >= one;
  };
  int64_t budget = request.kv_cache_bytes;
  if (budget == 0) {
    budget = holds_all(left / 2) ? one * request.max_num_seqs : left / 2;
  }
  const auto pages_of = [&](int64_t bytes) {
    return layout.PagesForBudget(
        {.budget_bytes = bytes,
         .max_model_len = max_model_len_,
         .max_chunk_tokens = request.max_batched_tokens});
  };
  // A pool beyond what is left is refused whatever is kept beside it.
  const int64_t kept = worker::KeptWeightBytes(
      *source_.plan,
      worker::LimitsInPool({.max_batched_tokens = request.max_batched_tokens,
                            .max_num_seqs = request.max_num_seqs,
                            .most_slots = max_model_len_},
                           *source_.plan, layout,
                           pages_of(std::min(budget, left))));
  const int64_t host_budget = request.host_pool_bytes.value_or(
      holds_all(budget)
          ? 0
          : std::min(budget / 4,
                     std::max(int64_t{0}, left - kept - budget) / 2));
  KVASIR_RETURN_IF_ERROR(
      worker::CheckPoolFitsMemory({.pool_bytes = budget,
                                   .host_pool_bytes = host_budget,
                                   .weight_bytes = weight_bytes,
                                   .kept_bytes = kept,
                                   .available_bytes = available}));
  const absl::Status fits = layout.OneSequenceFits(
      pages_of(budget), max_model_len_, request.max_batched_tokens);
  if (fits.ok()) return PoolBytes{.pool = budget, .host_pool = host_budget};
  return absl::Status(
      fits.code(),
      absl::StrCat(fits.message(), " (the pool has ",
                   HumanBytes(static_cast<double>(budget)),
                   "; raise --kv-cache-bytes or lower --max-model-len)"));
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(
    const LoadRequest& request) {
  auto model = std::unique_ptr<LoadedModel>(new LoadedModel());
  KVASIR_ASSIGN_OR_RETURN(
      model->source_,
      OpenModelSource(request.model, PlanUse::kRun, request.plan));
  const ModelSource& source = model->source_;
  if (request.check) KVASIR_RETURN_IF_ERROR(request.check(source));
  if (request.stretch_positions && source.shape.has_value() &&
      !source.spec.learned_positions) {
    int64_t& positions = model->source_.spec.max_position_embeddings;
    positions = std::max(positions, request.max_model_len);
  }
  KVASIR_RETURN_IF_ERROR(model->ChooseLength(request.max_model_len));
  model->num_threads_ = request.model.threads > 0
                            ? request.model.threads
                            : base::ReadMachineLimits().cpus;

  worker::RankOptions options;
  options.num_threads = model->num_threads_;
  options.memory_limit_bytes = base::ReadMachineLimits().memory_bytes;
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<kernels::Device> device,
      OpenDevice(request.model.device, options.memory_limit_bytes));
  int64_t granule_bytes = 0;
  worker::MatrixFormat matrices;
  if (device != nullptr) {
    granule_bytes = device->page_granule_bytes();
    matrices = worker::MatrixFormat::Of(*device);
    options.make_device = [&device](auto&&...) { return std::move(device); };
  }
  options.page_tokens = request.model.page_tokens;
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<worker::WeightSource> weights,
                          OpenWeights(source, request.model.weights_seed));
  KVASIR_ASSIGN_OR_RETURN(const int64_t weight_bytes,
                          worker::CountWeightBytes(source.spec, source.served,
                                                   weights.get(), matrices));
  KVASIR_ASSIGN_OR_RETURN(cache::PageLayout layout,
                          cache::PageLayout::Create(
                              *source.plan, {.page_tokens = options.page_tokens,
                                             .granule_bytes = granule_bytes}));
  options.layout = std::make_shared<cache::PageLayout>(std::move(layout));
  KVASIR_ASSIGN_OR_RETURN(
      const PoolBytes bytes,
      model->ChoosePoolBytes(request, *options.layout, weight_bytes));
  options.kv_cache_bytes = bytes.pool;
  options.host_pool_bytes = bytes.host_pool;
  options.executor.max_model_len = model->max_model_len_;
  options.executor.max_num_seqs = request.max_num_seqs;
  options.executor.max_batched_tokens = request.max_batched_tokens;
  options.executor.profile = request.profile;
  options.progress = request.progress;
  KVASIR_ASSIGN_OR_RETURN(
      model->rank_,
      worker::Rank::Create(source.spec, source.served, weights.get(), options));
  cache::KvCacheConfig config = cache::MakeKvCacheConfig(
      model->layout(), model->pages(), model->rank_->cache_id(),
      model->rank_->host_pages());
  config.prefix_reuse = config.prefix_reuse && request.prefix_reuse;
  model->cache_ = std::make_unique<cache::KvCache>(std::move(config));
  return model;
}

int64_t LoadedModel::total_pages() const {
  int64_t total = 0;
  for (const int64_t count : pages()) total += count;
  return total;
}

int64_t LoadedModel::weight_bytes() const {
  return rank_->allocator().use(kernels::MemoryTag::kWeights).bytes;
}
int64_t LoadedModel::kv_pool_bytes() const {
  return rank_->allocator().use(kernels::MemoryTag::kKvCache).bytes;
}
int64_t LoadedModel::host_pool_bytes() const {
  return rank_->allocator().use(kernels::MemoryTag::kHostPool).bytes;
}
int64_t LoadedModel::workspace_bytes() const {
  return rank_->allocator().use(kernels::MemoryTag::kWorkspace).bytes;
}

}  // namespace kvasir::cli
