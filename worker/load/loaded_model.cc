#include "worker/load/loaded_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/layout/sequence_pages.h"
#include "model/checkpoint/weight_tiles.h"
#include "plan/presets.h"
#include "worker/load/device.h"
#include "worker/load/group_identity.h"
#include "worker/load/sample_text.h"
#include "worker/ranks/key_means.h"
#include "worker/weights/weight_source.h"

namespace kvasir::cli {
namespace {

// `source` must outlive the result.
absl::StatusOr<std::unique_ptr<worker::WeightSource>> OpenWeights(
    const ModelSource& source, uint64_t seed) {
  if (source.checkpoint.has_value()) {
    return std::make_unique<worker::CheckpointSource>(&*source.checkpoint);
  }
  return worker::RandomSource::Create(*source.shape, source.spec, *source.plan,
                                      seed, kernels::DType::kBf16);
}

// Returns the named plans, except the dense one, that can be served with the
// model's own weights. Plans of fewer bytes come first.
std::vector<std::shared_ptr<const worker::ServedPlan>> PlansToChooseFrom(
    const ModelSource& source, const ModelOptions& options,
    const worker::ServeOptions& serve) {
  std::vector<std::shared_ptr<const worker::ServedPlan>> plans;
  if (source.checkpoint.has_value() &&
      source.checkpoint->kv_plan_json().has_value()) {
    return plans;
  }
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    if (!preset.auto_may_choose || preset.name == plan::kDensePreset) continue;
    auto served = ServeNamedPlan(source, preset.name, options, serve);
    if (served.ok()) {
      plans.push_back(*std::move(served));
    } else {
      base::LogInfo("--kv-plan auto: a plan does not fit the model",
                    {{"plan", preset.name},
                     {"why", std::string(served.status().message())}});
    }
  }
  // Presets are sorted by descending bytes.
  std::reverse(plans.begin(), plans.end());
  return plans;
}

// Returns the value of RankIdentity.plan_check.
std::string PlanCheckOf(const LoadRequest& request) {
  if (!request.plan_check.has_value()) return "off";
  const std::vector<int32_t>& ids = request.plan_check->token_ids;
  return absl::StrCat(
      request.choose_plan ? "auto" : "one plan", ", ", ids.size(), " tokens, ",
      base::Sha256Hex(absl::StrCat(request.plan_check->most_kl, " ",
                                   absl::StrJoin(ids, ","))));
}

// Returns the tokens with which the means of keys are measured. Empty if they
// are not wanted, or if the model's tokenizer cannot be read.
std::vector<int32_t> KeyMeanTokens(const LoadRequest& request) {
  if (request.model.no_key_means || request.model.model.empty()) return {};
  if (request.tokenizer != nullptr) {
    return SampleTokens(request.tokenizer, worker::kKeyMeanTokens);
  }
  const auto tokenizer = model::Tokenizer::Load(request.model.model);
  if (tokenizer.ok()) {
    return SampleTokens(tokenizer->get(), worker::kKeyMeanTokens);
  }
  base::LogWarning(
      "the means of keys are not measured: the tokenizer cannot be read",
      {{"why", std::string(tokenizer.status().message())}});
  return {};
}

// Returns the value of RankIdentity.key_means.
std::string KeyMeansOf(const std::vector<int32_t>& tokens) {
  if (tokens.empty()) return "off";
  return absl::StrCat(tokens.size(), " tokens, ", worker::KeyMeansId(tokens));
}

LocalShare LocalShareOf(const LoadRequest& request) {
  return request.group != nullptr ? request.group->local() : LocalShare{};
}

}  // namespace

absl::Status LoadedModel::ChooseLength(int64_t max_model_len) {
  const int64_t own = source_.spec.max_position_embeddings;
  if (max_model_len > own) {
    // A text may have more tokens than the model has positions only if
    // evictions keep no more slots than positions.
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
      return refuse(", which are learned, one vector for each position");
    }
    if (held == max_model_len) return refuse();
    if (held > own)
      return refuse(", and so are the ", held,
                    " slots that stay after evictions");
    if (max_model_len > cache::kMaxSequenceTokens) {
      return refuse(", and more than the longest length that can be served, ",
                    cache::kMaxSequenceTokens);
    }
  }
  max_model_len_ = max_model_len > 0 ? max_model_len : own;
  return absl::OkStatus();
}

absl::StatusOr<LoadedModel::Room> LoadedModel::RoomOn(
    const kernels::Device* device, double utilization, LocalShare local) {
  Room room;
  const int64_t host = base::ReadMachineLimits().available_bytes / local.count;
  if (device == nullptr || !device->has_own_memory()) {
    room.available_bytes = host;
    return room;
  }
  KVASIR_ASSIGN_OR_RETURN(const kernels::DeviceMemory memory, device->memory());
  const auto most = static_cast<int64_t>(
      utilization * static_cast<double>(memory.total_bytes));
  room.available_bytes =
      std::max(int64_t{0}, most - (memory.total_bytes - memory.free_bytes));
  room.host_available_bytes = host;
  return room;
}

absl::StatusOr<worker::PoolBytes> LoadedModel::ChoosePoolBytes(
    const LoadRequest& request, const Room& room,
    const plan::ResolvedPlan& plan, const cache::PageLayout& layout,
    int64_t weight_bytes) const {
  const int64_t available = room.available_bytes;
  const int64_t left = std::max(int64_t{0}, available - weight_bytes);
  // On a GPU the pool may take all memory that the weights leave, because a
  // first step measures later what else needs memory. On a host, half of that
  // memory is left for other uses.
  const int64_t share = room.host_available_bytes.has_value() ? left : left / 2;
  const int64_t one =
      layout.BytesAtLength(max_model_len_, request.max_batched_tokens);
  // Divides instead of multiplying, because the product may not fit into 64
  // bits.
  const auto holds_all = [&](int64_t bytes) {
    return bytes / request.max_num_seqs >= one;
  };
  int64_t budget = request.kv_cache_bytes;
  if (budget == 0) {
    budget = holds_all(share) ? one * request.max_num_seqs : share;
  }
  const auto pages_of = [&](int64_t bytes) {
    return layout.PagesForBudget(
        {.budget_bytes = bytes,
         .max_model_len = max_model_len_,
         .max_chunk_tokens = request.max_batched_tokens});
  };
  // Evictions keep attention weights, whose bytes depend on the pool's size. A
  // pool larger than `left` is refused below, so no larger pool is considered
  // here.
  const int64_t kept = worker::KeptWeightBytes(
      plan,
      worker::LimitsInPool({.max_batched_tokens = request.max_batched_tokens,
                            .max_num_seqs = request.max_num_seqs,
                            .most_slots = max_model_len_},
                           plan, layout, pages_of(std::min(budget, left))));
  const bool apart = room.host_available_bytes.has_value();
  if (apart && weight_bytes > available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "weights of ", weight_bytes, " bytes do not fit: only ", available,
        " bytes of the GPU's memory may be used (--gpu-memory-utilization ",
        request.gpu_memory_utilization,
        "); take a smaller model, or another --device"));
  }
  if (apart && request.kv_cache_bytes == 0) {
    budget = std::clamp(budget, int64_t{0}, std::max(int64_t{0}, left - kept));
  }
  const int64_t host_left = room.host_available_bytes.value_or(
      std::max(int64_t{0}, left - kept - budget));
  const int64_t host_budget = request.host_pool_bytes.value_or(
      holds_all(budget) ? 0 : std::min(budget / 4, host_left / 2));
  const absl::Status room_for =
      worker::CheckPoolFitsMemory({.pool_bytes = budget,
                                   .host_pool_bytes = apart ? 0 : host_budget,
                                   .weight_bytes = weight_bytes,
                                   .kept_bytes = kept,
                                   .available_bytes = available});
  if (!room_for.ok()) {
    return !apart ? room_for
                  : absl::Status(
                        room_for.code(),
                        absl::StrCat(
                            room_for.message(),
                            " or raise --gpu-memory-utilization, which is ",
                            request.gpu_memory_utilization));
  }
  if (apart && host_budget > *room.host_available_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a host pool of ", host_budget, " bytes does not fit: the host has ",
        *room.host_available_bytes,
        " bytes available; lower --host-pool-bytes to at most that number"));
  }
  const absl::Status fits = layout.OneSequenceFits(
      pages_of(budget), max_model_len_, request.max_batched_tokens);
  if (fits.ok())
    return worker::PoolBytes{.pool = budget, .host_pool = host_budget};
  return absl::Status(
      fits.code(),
      absl::StrCat(fits.message(), " (the pool has ",
                   HumanBytes(static_cast<double>(budget)),
                   apart && request.kv_cache_bytes == 0
                       ? "; raise --gpu-memory-utilization or lower "
                         "--max-model-len)"
                       : "; raise --kv-cache-bytes or lower --max-model-len)"));
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadedModel::Load(
    const LoadRequest& request) {
  auto model = std::unique_ptr<LoadedModel>(new LoadedModel());
  KVASIR_ASSIGN_OR_RETURN(
      model->source_,
      OpenModelSource(
          request.model, PlanUse::kRun, request.plan,
          request.group != nullptr ? request.group->shard() : plan::TpShard{}));
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
                            : std::max(1, base::ReadMachineLimits().cpus /
                                              LocalShareOf(request).count);

  DeviceWish wish = DeviceWishOf(source, request.model);
  wish.next_gpu = LocalShareOf(request).index;
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<kernels::Device> device,
      OpenDevice(request.model.device, wish, request.open_cuda));
  const bool may_go_on =
      request.model.device.device == "auto" && device != nullptr;
  absl::Status loaded = model->LoadOn(std::move(device), request);
  if (may_go_on && absl::IsUnimplemented(loaded)) {
    base::LogWarning("--device auto: the model runs on the cpu",
                     {{"why_not_cuda", std::string(loaded.message())}});
    loaded = model->LoadOn(nullptr, request);
  }
  KVASIR_RETURN_IF_ERROR(loaded);
  return model;
}

absl::StatusOr<worker::Collective*> LoadedModel::JoinGroup(
    const LoadRequest& request, const std::vector<int32_t>& key_mean_tokens,
    const kernels::Device* device) const {
  GroupTerms terms;
  KVASIR_ASSIGN_OR_RETURN(
      terms.identity,
      IdentityOf(source_, request.model.weights_seed, device,
                 {.page_tokens = request.model.page_tokens,
                  .max_model_len = max_model_len_,
                  .max_num_seqs = request.max_num_seqs,
                  .max_batched_tokens = request.max_batched_tokens,
                  .deterministic = request.model.deterministic,
                  .graphs = request.graphs,
                  .plan_check = PlanCheckOf(request),
                  .key_means = KeyMeansOf(key_mean_tokens)}));
  // Every rank combines the tile hashes of all ranks, so all ranks get the same
  // weights_id, which is part of the cache_id.
  terms.combine = [](absl::Span<const std::string> tiles_by_rank)
      -> absl::StatusOr<worker::CombinedIds> {
    KVASIR_ASSIGN_OR_RETURN(std::string weights_id,
                            model::CombineWeightTiles(tiles_by_rank));
    return worker::CombinedIds{.weights_id = std::move(weights_id)};
  };
  if (device != nullptr) {
    terms.use_device = [device] { return device->UseOnThisThread(); };
  }
  return request.group->Join(terms);
}

absl::Status LoadedModel::LoadOn(std::unique_ptr<kernels::Device> device,
                                 const LoadRequest& request) {
  const ModelSource& source = source_;
  worker::RankOptions options;
  options.num_threads = num_threads_;
  options.deterministic = request.model.deterministic;
  const LocalShare local = LocalShareOf(request);
  KVASIR_ASSIGN_OR_RETURN(
      const Room room,
      RoomOn(device.get(), request.gpu_memory_utilization, local));
  std::shared_ptr<const worker::ServedPlan> served = source.served;
  const worker::ServeOptions serve =
      ServeOptionsOf(request.model, device.get());
  if (serve.lift_prompts !=
      ServeOptionsOf(request.model, nullptr).lift_prompts) {
    KVASIR_ASSIGN_OR_RETURN(served, worker::ServePlan(source.plan, serve));
  }
  if (request.choose_plan || served->can_leave_key_means_out()) {
    options.key_mean_tokens = KeyMeanTokens(request);
  }
  options.plan_check = request.plan_check;
  if (request.choose_plan && options.plan_check.has_value()) {
    auto& plans = options.plan_check->instead;
    plans = PlansToChooseFrom(source, request.model, serve);
    plans.push_back(std::move(served));
    served = std::move(plans.front());
    plans.erase(plans.begin());
  }
  worker::MatrixFormat matrices;
  if (device == nullptr) {
    options.memory_limit_bytes =
        base::ReadMachineLimits().memory_bytes / local.count;
  } else {
    matrices = worker::MatrixFormat::Of(*device);
    options.make_device = [&device](auto&&...) { return std::move(device); };
  }
  options.page_tokens = request.model.page_tokens;
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<worker::WeightSource> weights,
                          OpenWeights(source, request.model.weights_seed));
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t weight_bytes,
      worker::CountWeightBytes(source.spec, served, weights.get(), matrices));
  options.choose_pools = [&](const plan::ResolvedPlan& plan,
                             const cache::PageLayout& layout) {
    return ChoosePoolBytes(request, room, plan, layout, weight_bytes);
  };
  if (room.host_available_bytes.has_value()) {
    options.memory_utilization = request.gpu_memory_utilization;
    options.kv_cache_exact = request.kv_cache_bytes > 0;
  }
  options.executor.max_model_len = max_model_len_;
  options.executor.max_num_seqs = request.max_num_seqs;
  options.executor.max_batched_tokens = request.max_batched_tokens;
  options.executor.graphs = request.graphs;
  options.executor.profile = request.profile;
  options.progress = request.progress;
  worker::Collective* collective = nullptr;
  if (request.group != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(
        collective, JoinGroup(request, options.key_mean_tokens, device.get()));
    options.agree = [group = request.group](const worker::RankOffer& offer) {
      return group->Agree(offer);
    };
  }
  KVASIR_ASSIGN_OR_RETURN(
      rank_, worker::Rank::Create(source.spec, served, weights.get(), options,
                                  collective));
  source_.served = rank_->served_plan();
  source_.plan = source_.served->resolved;
  cache::KvCacheConfig config = cache::MakeKvCacheConfig(
      this->layout(), pages(), rank_->cache_id(), rank_->host_pages());
  config.prefix_reuse = config.prefix_reuse && request.prefix_reuse;
  cache_ = std::make_unique<cache::KvCache>(std::move(config));
  return absl::OkStatus();
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
