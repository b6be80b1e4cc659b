#include "cli/loaded_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "cache/cache_id.h"
#include "cli/flags.h"
#include "worker/weight_source.h"
#include "worker/weights.h"

namespace kvasir::cli {
namespace {

int ThreadCount(int asked) {
  return asked > 0 ? asked : base::ReadMachineLimits().cpus;
}

absl::StatusOr<worker::ModelWeights> LoadWeightsOf(
    const ModelSource& source, const LoadRequest& request,
    kernels::DeviceAllocator* allocator, base::ThreadPool* pool) {
  const worker::LoadOptions options{.pool = pool, .progress = request.progress};
  if (source.checkpoint.has_value()) {
    worker::CheckpointSource weights(&*source.checkpoint);
    return worker::LoadWeights(source.spec, &weights, allocator, options);
  }
  worker::RandomSource weights(*source.shape, request.model.weights_seed,
                               kernels::DType::kBf16);
  return worker::LoadWeights(source.spec, &weights, allocator, options);
}

}  // namespace

absl::Status LoadedModel::ChooseLength(int64_t max_model_len) {
  const int64_t own = source_.spec.max_position_embeddings;
  if (max_model_len > own) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max-model-len ", max_model_len, " is more than the ",
                     own, " positions of ", source_.name));
  }
  max_model_len_ = max_model_len > 0 ? max_model_len : own;
  return absl::OkStatus();
}

absl::Status LoadedModel::PlanPages(const LoadRequest& request) {
  int64_t budget = request.kv_cache_bytes;
  if (budget == 0) {
    const int64_t one =
        layout_->BytesAtLength(max_model_len_, request.max_batched_tokens);
    budget = std::min(base::ReadMachineLimits().available_bytes / 2,
                      one * request.max_num_seqs);
  }
  pages_ =
      layout_->PagesForBudget({.budget_bytes = budget,
                               .max_model_len = max_model_len_,
                               .max_chunk_tokens = request.max_batched_tokens});
  const absl::Status fits = layout_->OneSequenceFits(
      pages_, max_model_len_, request.max_batched_tokens);
  if (fits.ok()) return absl::OkStatus();
  return absl::Status(
      fits.code(),
      absl::StrCat(fits.message(), " (the pool has ", HumanBytes(budget),
                   "; raise --kv-cache-bytes or lower --max-model-len)"));
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(
    const LoadRequest& request) {
  auto model = std::unique_ptr<LoadedModel>(new LoadedModel());
  KVASIR_ASSIGN_OR_RETURN(model->source_, OpenModelSource(request.model));
  KVASIR_RETURN_IF_ERROR(model->ChooseLength(request.max_model_len));
  KVASIR_RETURN_IF_ERROR(cache::ServedByThisBuild(model->source_.plan));
  KVASIR_ASSIGN_OR_RETURN(
      cache::PageLayout layout,
      cache::PageLayout::Create(
          model->source_.plan, model->source_.cache_shape,
          {.page_tokens = request.model.page_tokens,
           .max_chunk_tokens = request.max_batched_tokens}));
  model->layout_ = std::make_unique<cache::PageLayout>(std::move(layout));

  model->pool_ =
      std::make_unique<base::ThreadPool>(ThreadCount(request.model.threads));
  KVASIR_ASSIGN_OR_RETURN(model->allocator_, kernels::DeviceAllocator::Create(
                                                 kernels::DeviceKind::kCpu));
  model->stream_ = std::make_unique<kernels::CpuStream>(model->pool_.get());
  model->collective_ = std::make_unique<worker::SingleRank>();

  KVASIR_ASSIGN_OR_RETURN(
      worker::ModelWeights weights,
      LoadWeightsOf(model->source_, request, model->allocator_.get(),
                    model->pool_.get()));
  // After the weights: the default pool is a share of what they leave.
  KVASIR_RETURN_IF_ERROR(model->PlanPages(request));

  const model::RopeSpec& rope = model->source_.spec.rope;
  model->cache_id_ = cache::CacheId(
      model->source_.plan,
      {.shape = model->source_.cache_shape,
       .page_tokens = request.model.page_tokens,
       .rope = {.interleaved = rope.pairing == model::RopePairing::kInterleaved,
                .frequencies = rope.frequencies,
                .attention_factor = rope.attention_factor},
       .tensor_fingerprint = weights.weights_id});
  KVASIR_ASSIGN_OR_RETURN(
      model->executor_,
      worker::ModelExecutor::Create(
          {.spec = &model->source_.spec,
           .plan = &model->source_.plan,
           .layout = model->layout_.get(),
           .pages = model->pages_,
           .allocator = model->allocator_.get(),
           .stream = model->stream_.get(),
           .collective = model->collective_.get()},
          std::move(weights),
          {.max_model_len = model->max_model_len_,
           .max_num_seqs = request.max_num_seqs,
           .max_batched_tokens = request.max_batched_tokens}));
  cache::KvCacheConfig config = cache::MakeKvCacheConfig(
      *model->layout_, model->pages_, model->cache_id_);
  config.prefix_reuse = config.prefix_reuse && request.prefix_reuse;
  model->cache_ = std::make_unique<cache::KvCache>(std::move(config));
  return model;
}

int64_t LoadedModel::weight_bytes() const {
  return allocator_->use(kernels::MemoryTag::kWeights).bytes;
}
int64_t LoadedModel::kv_pool_bytes() const {
  return allocator_->use(kernels::MemoryTag::kKvCache).bytes;
}
int64_t LoadedModel::workspace_bytes() const {
  return allocator_->use(kernels::MemoryTag::kWorkspace).bytes;
}

}  // namespace kvasir::cli
