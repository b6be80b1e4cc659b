#include "worker/ranks/rank.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cache/layout/cache_id.h"
#include "model/checkpoint/weight_tiles.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/key_means.h"

namespace kvasir::worker {
namespace {

// Runs the largest possible prefill and a decode, so that all memory that a
// step may need is allocated. This includes memory for the code and stacks of
// kernels, which CUDA allocates when they first run.
absl::Status RunLargestSteps(ModelExecutor* executor,
                             const cache::PageLayout& layout,
                             const cache::PageCounts& pages,
                             const ModelExecutorOptions& limits) {
  DirectRunner runner(executor, &layout, pages);
  std::vector<int32_t> prompt(static_cast<size_t>(std::clamp(
      limits.max_model_len - 1, int64_t{1}, limits.max_batched_tokens)));
  runner.SetPrompt(1, static_cast<int64_t>(prompt.size()));
  // A step must end where an eviction is due, so the prompt must not go beyond
  // that point.
  if (const auto at = runner.next_eviction(1); at.has_value()) {
    prompt.resize(std::min(prompt.size(),
                           static_cast<size_t>(std::max(*at, int64_t{1}))));
  }
  KVASIR_RETURN_IF_ERROR(runner
                             .Run({{.sequence_id = 1,
                                    .token_ids = prompt,
                                    .sample = GreedySample()}})
                             .status());
  if (limits.max_model_len == 1) return absl::OkStatus();
  return runner.Run({{.sequence_id = 1, .sample = GreedySample()}}).status();
}

}  // namespace

bool PromptsMayLift(const kernels::Device& device) {
  return device.kind() == kernels::DeviceKind::kCpu;
}

absl::Status CheckPoolFitsMemory(const PoolMemory& memory) {
  const int64_t left =
      std::max(int64_t{0}, memory.available_bytes - memory.weight_bytes -
                               memory.kept_bytes);
  std::string taken = absl::StrCat(memory.weight_bytes);
  if (memory.kept_bytes > 0) {
    absl::StrAppend(&taken, ", attention weights kept for evictions ",
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
                      const std::string& weights_id, bool key_bias_left_out,
                      const std::string& key_means) {
  return cache::CacheId(
      plan, {.shape = model::AttentionShapeOf(spec),
             .page_tokens = page_tokens,
             .rope = {.interleaved =
                          spec.rope.pairing == model::RopePairing::kInterleaved,
                      .frequencies = spec.rope.frequencies,
                      .attention_factor = spec.rope.attention_factor},
             .key_bias_left_out = key_bias_left_out,
             .key_means = key_means,
             .tensor_fingerprint = weights_id});
}

Rank::Rank(model::DecoderSpec spec) : spec_(std::move(spec)) {}

Rank::~Rank() = default;

absl::StatusOr<std::unique_ptr<Rank>> Rank::Create(
    const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
    WeightSource* source, const RankOptions& options, Collective* collective) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<Rank> rank,
                          Start(spec, options, collective));
  plan::TpShard shard;
  if (collective != nullptr) shard = collective->shard();
  const bool lift = !options.deterministic && PromptsMayLift(*rank->device_);
  KVASIR_ASSIGN_OR_RETURN(std::shared_ptr<const ServedPlan> served,
                          ServePlan(plan, model::AttentionShapeOf(spec),
                                    {.lift_prompts = lift}, shard));
  KVASIR_RETURN_IF_ERROR(
      rank->Load(std::move(served), source, options, collective));
  return rank;
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Create(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const RankOptions& options, Collective* collective) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<Rank> rank,
                          Start(spec, options, collective));
  KVASIR_RETURN_IF_ERROR(
      rank->Load(std::move(plan), source, options, collective));
  return rank;
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Start(
    const model::DecoderSpec& spec, const RankOptions& options,
    Collective* collective) {
  plan::TpShard shard;
  if (collective != nullptr) shard = collective->shard();
  KVASIR_RETURN_IF_ERROR(ShardSizes::Create(spec, shard).status());
  if (options.memory_limit_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the memory limit must be at least 0 bytes, but is ",
                     options.memory_limit_bytes));
  }
  model::DecoderSpec of_length = spec;
  model::ChooseRope(options.executor.max_model_len, &of_length.rope);
  std::unique_ptr<Rank> rank(new Rank(std::move(of_length)));
  rank->pool_ = std::make_unique<base::ThreadPool>(options.num_threads);
  rank->device_ =
      options.make_device
          ? options.make_device(rank->pool_.get(), options.backend,
                                options.memory_limit_bytes)
          : std::make_unique<kernels::CpuDevice>(
                rank->pool_.get(), options.backend, options.memory_limit_bytes);
  return rank;
}

cache::PageCounts Rank::PagesFor(int64_t bytes,
                                 const RankOptions& options) const {
  return layout_->PagesForBudget(
      {.budget_bytes = bytes,
       .max_model_len = options.executor.max_model_len,
       .max_chunk_tokens = options.executor.max_batched_tokens});
}

cache::PageCounts Rank::LeastPages(const RankOptions& options) const {
  return PagesFor(layout_->BytesAtLength(options.executor.max_model_len,
                                         options.executor.max_batched_tokens),
                  options);
}

absl::Status Rank::Load(std::shared_ptr<const ServedPlan> plan,
                        WeightSource* source, const RankOptions& options,
                        Collective* collective) {
  if (collective == nullptr) collective = &single_rank_;
  stream_ = device_->MakeStream();
  std::vector<std::shared_ptr<const ServedPlan>> plans = {std::move(plan)};
  if (options.plan_check.has_value()) {
    plans.insert(plans.end(), options.plan_check->instead.begin(),
                 options.plan_check->instead.end());
  }
  key_mean_tokens_ = options.key_mean_tokens;
  key_mean_tokens_.resize(
      std::min({key_mean_tokens_.size(), static_cast<size_t>(kKeyMeanTokens),
                static_cast<size_t>(options.executor.max_model_len)}));
  if (!CanMeasureWith(spec_, key_mean_tokens_)) key_mean_tokens_.clear();
  if (device_->kind() != kernels::DeviceKind::kCpu) {
    KVASIR_RETURN_IF_ERROR(
        RemoveUnsupported(source, options, collective, &plans));
  }
  KVASIR_RETURN_IF_ERROR(UsePlan(plans.front(), options));
  KVASIR_RETURN_IF_ERROR(SizePools(options));
  KVASIR_ASSIGN_OR_RETURN(
      ModelWeights weights,
      LoadWeights(spec_, plan_, source, device_.get(),
                  {.pool = pool_.get(), .progress = options.progress}));
  device_->FreeWriteBuffers();
  read_bytes_ = weights.read_bytes;
  std::string tiles = std::move(weights.weight_tiles);
  const TextRank text_rank = {.spec = &spec_,
                              .device = device_.get(),
                              .stream = stream_.get(),
                              .collective = collective,
                              .max_model_len = options.executor.max_model_len};
  KVASIR_RETURN_IF_ERROR(MeasureMeans(plans, text_rank, &weights));
  KVASIR_RETURN_IF_ERROR(
      ChoosePlan(plans, tiles, text_rank, options, &weights));
  if (options.memory_utilization > 0) {
    KVASIR_RETURN_IF_ERROR(
        MeasurePages(std::move(weights), options, collective));
    const cache::PageCounts pages = pages_;
    const cache::PageCounts host_pages = host_pages_;
    KVASIR_RETURN_IF_ERROR(Agree(std::move(tiles), options));
    if (pages == pages_ && host_pages == host_pages_) return absl::OkStatus();
    weights = std::move(*executor_).TakeWeights();
  } else {
    KVASIR_RETURN_IF_ERROR(Agree(std::move(tiles), options));
  }
  return MakeExecutor(std::move(weights), options, collective);
}

absl::Status Rank::UsePlan(std::shared_ptr<const ServedPlan> plan,
                           const RankOptions& options) {
  plan_ = std::move(plan);
  KVASIR_ASSIGN_OR_RETURN(
      cache::PageLayout layout,
      cache::PageLayout::Create(
          *plan_->resolved, {.page_tokens = options.page_tokens,
                             .granule_bytes = device_->page_granule_bytes()}));
  layout_ = std::make_shared<cache::PageLayout>(std::move(layout));
  return absl::OkStatus();
}

absl::Status Rank::SizePools(const RankOptions& options) {
  pool_bytes_ = {.pool = options.kv_cache_bytes,
                 .host_pool = options.host_pool_bytes};
  if (options.choose_pools) {
    KVASIR_ASSIGN_OR_RETURN(pool_bytes_,
                            options.choose_pools(*plan_->resolved, *layout_));
  }
  pages_ = options.pages;
  if (pages_.empty()) pages_ = PagesFor(pool_bytes_.pool, options);
  host_pages_ = options.host_pages;
  if (host_pages_.empty()) {
    host_pages_ = PagesFor(pool_bytes_.host_pool, options);
  }
  return layout_->OneSequenceFits(pages_, options.executor.max_model_len,
                                  options.executor.max_batched_tokens);
}

absl::Status Rank::RemoveUnsupported(
    WeightSource* source, const RankOptions& options, Collective* collective,
    std::vector<std::shared_ptr<const ServedPlan>>* plans) {
  // The last plan is served if no other one is good enough.
  absl::Status last;
  std::vector<std::shared_ptr<const ServedPlan>> left;
  for (const std::shared_ptr<const ServedPlan>& plan : *plans) {
    KVASIR_RETURN_IF_ERROR(UsePlan(plan, options));
    last = CheckOps(source, options, !key_mean_tokens_.empty(), collective);
    if (absl::IsUnimplemented(last) && !key_mean_tokens_.empty()) {
      // The device may have no kernels for keys without their means.
      last = CheckOps(source, options, /*with_means=*/false, collective);
      if (last.ok()) key_mean_tokens_.clear();
    }
    if (last.ok()) {
      left.push_back(plan);
      continue;
    }
    plan_checks_.push_back({.plan = plan->resolved->source.method(),
                            .skipped = std::string(last.message())});
  }
  KVASIR_RETURN_IF_ERROR(last);
  *plans = std::move(left);
  return absl::OkStatus();
}

std::string Rank::CacheIdOfPlan(const ServedPlan& plan,
                                const std::string& weights_id,
                                const RankOptions& options) const {
  return CacheIdOf(plan.resolved->source, spec_, options.page_tokens,
                   weights_id, plan.leaves_key_bias_out(),
                   plan.can_leave_key_means_out() ? key_means_ : "");
}

absl::Status Rank::MeasureMeans(
    absl::Span<const std::shared_ptr<const ServedPlan>> plans,
    const TextRank& text_rank, ModelWeights* weights) {
  if (std::none_of(plans.begin(), plans.end(), [](const auto& plan) {
        return plan->can_leave_key_means_out();
      })) {
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(
      const bool measured,
      MeasureKeyMeans(text_rank, key_mean_tokens_, weights));
  if (measured) key_means_ = KeyMeansId(key_mean_tokens_);
  return absl::OkStatus();
}

absl::Status Rank::ChoosePlan(
    absl::Span<const std::shared_ptr<const ServedPlan>> plans,
    const std::string& weight_tiles, const TextRank& text_rank,
    const RankOptions& options, ModelWeights* weights) {
  if (!options.plan_check.has_value()) return absl::OkStatus();
  const PlanCheckRequest& request = *options.plan_check;
  PlanComparison comparison(text_rank, request);
  std::string weights_id;
  if (text_rank.collective->shard().size == 1) {
    KVASIR_ASSIGN_OR_RETURN(weights_id,
                            model::CombineWeightTiles({weight_tiles}));
  }
  const auto is_good = [&](const PlanCheck& check) {
    return check.is_dense ||
           (check.skipped.empty() && check.kl <= request.most_kl);
  };
  size_t used = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    KVASIR_ASSIGN_OR_RETURN(
        PlanCheck check,
        comparison.Compare(
            plans[i], CacheIdOfPlan(*plans[i], weights_id, options), weights));
    const bool cannot_compare = !check.skipped.empty();
    KVASIR_ASSIGN_OR_RETURN(const bool good,
                            comparison.FirstRankSays(is_good(check)));
    plan_checks_.push_back(std::move(check));
    used = i;
    if (request.instead.empty() || good) break;
    // If this plan could not be compared, the next plans cannot be either. So
    // continue with the last plan, which is served if no plan is good enough.
    if (cannot_compare && i + 2 < plans.size()) i = plans.size() - 2;
  }
  if (used == 0) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(UsePlan(plans[used], options));
  return SizePools(options);
}

absl::Status Rank::Agree(std::string weight_tiles, const RankOptions& options) {
  const auto own_cache_id = [&] {
    return CacheIdOfPlan(*plan_, weights_id_, options);
  };
  if (!options.agree) {
    KVASIR_ASSIGN_OR_RETURN(
        weights_id_, model::CombineWeightTiles({std::move(weight_tiles)}));
    cache_id_ = own_cache_id();
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(
      RankAgreement agreed,
      options.agree({.pages = pages_,
                     .host_pages = host_pages_,
                     .weight_tiles = std::move(weight_tiles),
                     .weight_bytes =
                         allocator().use(kernels::MemoryTag::kWeights).bytes}));
  const auto check = [](const char* pool, const cache::PageCounts& offered,
                        const cache::PageCounts& pages) {
    bool fits = pages.size() == offered.size();
    for (size_t i = 0; fits && i < pages.size(); ++i) {
      fits = pages[i] >= 0 && pages[i] <= offered[i];
    }
    if (fits) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "the group agreed on ", pool, "s of ", absl::StrJoin(pages, ", "),
        " pages (by page group), but each number must be 0 to what this rank "
        "has room for: ",
        absl::StrJoin(offered, ", ")));
  };
  KVASIR_RETURN_IF_ERROR(check("page pool", pages_, agreed.pages));
  KVASIR_RETURN_IF_ERROR(check("host pool", host_pages_, agreed.host_pages));
  KVASIR_RETURN_IF_ERROR(
      layout_->OneSequenceFits(agreed.pages, options.executor.max_model_len,
                               options.executor.max_batched_tokens));
  pages_ = std::move(agreed.pages);
  host_pages_ = std::move(agreed.host_pages);
  weights_id_ = std::move(agreed.weights_id);
  cache_id_ = own_cache_id();
  if (agreed.cache_id.empty() || agreed.cache_id == cache_id_) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the group's cache_id is ", agreed.cache_id,
                   ", this rank's is ", cache_id_));
}

absl::Status Rank::MakeExecutor(ModelWeights weights,
                                const RankOptions& options,
                                Collective* collective) {
  executor_ = nullptr;
  ModelExecutorOptions limits = options.executor;
  limits.prompts_as_rows = options.deterministic;
  KVASIR_ASSIGN_OR_RETURN(executor_,
                          ModelExecutor::Create({.spec = &spec_,
                                                 .plan = plan_->resolved.get(),
                                                 .layout = layout_.get(),
                                                 .pages = pages_,
                                                 .host_pages = host_pages_,
                                                 .device = device_.get(),
                                                 .stream = stream_.get(),
                                                 .collective = collective},
                                                std::move(weights), limits));
  return absl::OkStatus();
}

absl::Status Rank::CheckOps(WeightSource* source, const RankOptions& options,
                            bool with_means, Collective* collective) {
  // Makes an executor whose weights have no memory. Making it checks that the
  // device has all ops that steps launch.
  KVASIR_ASSIGN_OR_RETURN(
      ModelWeights weights,
      WeightsWithoutMemory(spec_, plan_, source, MatrixFormat::Of(*device_)));
  if (with_means) {
    const auto ones = std::make_shared<std::vector<float>>(
        static_cast<size_t>(weights.shard.kv_heads.count * spec_.head_dim),
        1.0f);
    for (LayerWeights& layer : weights.layers) layer.key_mean = ones;
  }
  const cache::PageCounts pages = std::exchange(pages_, LeastPages(options));
  const cache::PageCounts host_pages =
      std::exchange(host_pages_, PagesFor(0, options));
  const absl::Status made =
      MakeExecutor(std::move(weights), options, collective);
  executor_ = nullptr;
  pages_ = pages;
  host_pages_ = host_pages;
  // Ignores other errors, because the missing weights may have caused them.
  // Real errors are reported again once weights are loaded.
  return absl::IsUnimplemented(made) ? made : absl::OkStatus();
}

absl::Status Rank::MeasurePages(ModelWeights weights,
                                const RankOptions& options,
                                Collective* collective) {
  const ModelExecutorOptions& limits = options.executor;
  const cache::PageCounts host_pages =
      std::exchange(host_pages_, PagesFor(0, options));
  pages_ = LeastPages(options);
  KVASIR_RETURN_IF_ERROR(MakeExecutor(std::move(weights), options, collective));
  KVASIR_RETURN_IF_ERROR(
      RunLargestSteps(executor_.get(), *layout_, pages_, limits));
  KVASIR_ASSIGN_OR_RETURN(kernels::DeviceMemory memory, device_->memory());
  const auto most_bytes = static_cast<int64_t>(
      options.memory_utilization * static_cast<double>(memory.total_bytes));
  const auto pool_bytes = [this] {
    return allocator().use(kernels::MemoryTag::kKvCache).bytes;
  };
  const int64_t one =
      layout_->BytesAtLength(limits.max_model_len, limits.max_batched_tokens);
  int64_t budget =
      most_bytes - (memory.total_bytes - memory.free_bytes - pool_bytes());
  const auto refuse = [&](const auto&... why) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the device has ", memory.total_bytes, " bytes, of which ", most_bytes,
        " may be used (--gpu-memory-utilization ", options.memory_utilization,
        "); weights take ", allocator().use(kernels::MemoryTag::kWeights).bytes,
        ", workspace ", allocator().use(kernels::MemoryTag::kWorkspace).bytes,
        ", other processes and the driver ", memory.other_bytes,
        "; for the KV cache ", std::max(budget, int64_t{0}),
        " bytes are left, ", why...));
  };
  const int64_t asked = pool_bytes_.pool;
  const auto too_small = [&] {
    return refuse("and --kv-cache-bytes asks for ", asked,
                  "; lower it, or raise --gpu-memory-utilization");
  };
  if (options.kv_cache_exact && budget < asked) return too_small();
  budget = std::min(budget, asked);
  host_pages_ = host_pages;
  // Workspace and tables grow with the pool, and CUDA rounds sizes up. So the
  // used memory is measured, and the pool is made smaller until everything
  // fits.
  constexpr int kTries = 4;
  for (int i = 0; i < kTries && budget >= one; ++i) {
    pages_ = PagesFor(budget, options);
    KVASIR_RETURN_IF_ERROR(layout_->OneSequenceFits(
        pages_, limits.max_model_len, limits.max_batched_tokens));
    weights = std::move(*executor_).TakeWeights();
    KVASIR_RETURN_IF_ERROR(
        MakeExecutor(std::move(weights), options, collective));
    KVASIR_ASSIGN_OR_RETURN(memory, device_->memory());
    const int64_t over = memory.total_bytes - memory.free_bytes - most_bytes;
    if (over <= 0) return absl::OkStatus();
    budget = std::min(budget, pool_bytes()) - over;
    if (options.kv_cache_exact) return too_small();
  }
  return refuse("and one sequence of ", limits.max_model_len, " tokens takes ",
                one,
                "; raise --gpu-memory-utilization, lower --max-model-len or "
                "--max-batched-tokens, or take a smaller model");
}

}  // namespace kvasir::worker
