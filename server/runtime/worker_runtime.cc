#include "server/runtime/worker_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cli/exit_code.h"
#include "base/cli/units.h"
#include "base/cli/version.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "cache/prefix/prefix_hash.h"
#include "kernels/device/stream.h"
#include "server/runtime/plan_check.h"
#include "summary/plan_summary.h"
#include "summary/rank_summary.h"
#include "worker/load/end_tokens.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::cli {
namespace {

constexpr absl::Duration kStallGrace = absl::Seconds(3);

// Returns the statistics of cache and executor without the counts of the
// warm-up (`before`).
worker::CacheSample SampleOf(const cache::KvCacheStats& stats,
                             const worker::ExecutorTotals& totals,
                             const WarmUp& before) {
  worker::CacheSample sample;
  for (const cache::PageGroupStats& group : stats.groups) {
    sample.free_pages += group.free_pages - group.cached_pages;
    sample.used_pages += group.used_pages;
    sample.cached_pages += group.cached_pages;
    sample.physical_tokens =
        std::max(sample.physical_tokens, group.physical_tokens);
    sample.used_bytes += group.used_bytes;
    sample.padding_bytes += group.padding_bytes;
    sample.unfilled_bytes += group.unfilled_bytes;
    sample.side_bytes += group.side_bytes;
    sample.side_unused_bytes += group.side_unused_bytes;
    sample.host_used_bytes += group.host_used_bytes;
  }
  sample.bytes_to_host = stats.bytes_exported - before.cache.bytes_exported;
  sample.bytes_from_host = stats.bytes_imported - before.cache.bytes_imported;
  sample.leaked_pages = stats.leaked_pages;
  sample.logical_tokens = stats.logical_tokens;
  sample.prefix_query_tokens = stats.query_tokens;
  sample.prefix_hit_tokens = stats.hit_tokens;
  sample.window_pages_reclaimed = stats.pages_window_released;
  sample.evictions = stats.evictions - before.cache.evictions;
  sample.slots_evicted = stats.slots_evicted - before.cache.slots_evicted;
  sample.eviction_pages_reclaimed =
      stats.pages_reclaimed - before.cache.pages_reclaimed;
  sample.scored_by_weights =
      totals.scored_by_weights - before.executor.scored_by_weights;
  sample.scored_again = totals.scored_again - before.executor.scored_again;
  sample.scored_without_room =
      totals.scored_without_room - before.executor.scored_without_room;
  sample.eviction_seconds =
      totals.eviction_seconds - before.executor.eviction_seconds;
  sample.reconstruction_flops =
      totals.reconstruction_flops - before.executor.reconstruction_flops;
  sample.static_codes = totals.static_codes - before.executor.static_codes;
  sample.clamped_codes = totals.clamped_codes - before.executor.clamped_codes;
  sample.captured_steps =
      totals.captured_steps - before.executor.captured_steps;
  sample.replayed_steps =
      totals.replayed_steps - before.executor.replayed_steps;
  for (size_t expert = 0; expert < totals.expert_tokens.size(); ++expert) {
    sample.expert_tokens.push_back(totals.expert_tokens[expert] -
                                   before.executor.expert_tokens[expert]);
  }
  return sample;
}

// Logs which attention kernels a GPU uses. Without tensor cores they are many
// times slower, and nothing else would show this.
void LogAttentionKernels(const worker::ModelExecutor& executor) {
  for (const auto& [kernels, layers] : executor.attention_kernels()) {
    base::Log(
        kernels.why.empty() ? base::LogLevel::kInfo : base::LogLevel::kWarning,
        "attention kernels",
        {{"layers", layers},
         {"decode", kernels.decode},
         {"prompts", kernels.prompts},
         {"why", kernels.why}});
  }
}

// Logs which latents several ranks hold, because nothing else would show that
// these copies take memory.
absl::Status LogReplicas(const ModelSource& source, int64_t num_ranks) {
  constexpr size_t kMostLines = 8;
  KVASIR_ASSIGN_OR_RETURN(
      const RankPlans plans,
      ResolveForRanks(source.plan->source, source.spec, num_ranks));
  const std::vector<plan::Replica> replicas = plan::FindReplicas(plans);
  for (size_t i = 0; i < std::min(replicas.size(), kMostLines); ++i) {
    base::LogWarning(
        "several ranks store the same data",
        {{"what", ReplicaText(replicas[i])},
         {"extra_bytes_per_token", replicas[i].extra_bytes_per_token()}});
  }
  if (replicas.size() > kMostLines) {
    base::LogWarning(
        "several ranks store the same data",
        {{"more", replicas.size() - kMostLines},
         {"all", absl::StrCat("kvasir inspect --tp ", num_ranks)}});
  }
  return absl::OkStatus();
}

std::string InvarianceOf(LoadedModel& model) {
  const worker::ModelExecutor& executor = model.rank().executor();
  return worker::InvarianceName(executor.lifts_prompts(),
                                executor.prompts_are_rows() &&
                                    model.rank().device().rows_are_invariant());
}

worker::WorkerConstants ConstantsOf(LoadedModel& model) {
  worker::WorkerConstants constants{
      .version = kVersion,
      .model_name = model.source().name,
      .model_type = model.source().spec.model_type,
      .invariance = InvarianceOf(model),
      .device = model.rank().device().name(),
      .max_model_len = model.max_model_len(),
      .num_experts = model.source().spec.experts.count,
      .page_tokens = model.layout().page_tokens(),
      .total_pages = model.total_pages(),
      .kv_pool_bytes = model.kv_pool_bytes(),
      .host_pool_bytes = model.host_pool_bytes(),
      .weight_bytes = model.weight_bytes(),
      .kv_bytes_per_token = model.kv_bytes_per_token(),
      .kv_fixed_bytes_per_sequence =
          static_cast<double>(model.layout().fixed_bytes_per_sequence()),
      .kv_compression_ratio = model.kv_compression_ratio()};
  const auto& checks = model.rank().plan_checks();
  if (worker::IsDensePlan(model.rank().plan().source,
                          model::AttentionShapeOf(model.source().spec))) {
    constants.plan_check_kl = 0;
  } else if (!checks.empty() && checks.back().skipped.empty()) {
    constants.plan_check_kl = checks.back().kl;
  }
  for (const LayerSideSummary& side :
       SummarizePlan(*model.source().plan, model.layout())) {
    constants.layers.push_back(
        {side.layer, side.side, side.method, side.rank, side.bits});
  }
  return constants;
}

// Returns "-evict-" and a hash of how the plan evicts and selects tokens, or
// nothing if it does neither.
std::string EvictionId(const kvasir::v1::KvPlan& plan) {
  std::string bytes;
  bool any = false;
  for (const auto& layer : plan.layers()) {
    any |= layer.has_eviction() || layer.has_selection();
    for (const std::string& part : {layer.eviction().SerializeAsString(),
                                    layer.selection().SerializeAsString()}) {
      absl::StrAppend(&bytes, part.size(), ":", part);
    }
  }
  if (!any) return "";
  return absl::StrCat("-evict-", base::Sha256Hex(bytes).substr(0, 12));
}

worker::EvictionLimits EvictionLimitsOf(const EngineFlags& flags,
                                        const ModelSource& source) {
  worker::EvictionLimits limits = worker::EvictionLimitsOf(*source.plan);
  limits.max_slots = source.spec.max_position_embeddings;
  const auto least = plan::ParseEvictionBudget(flags.eviction_min_budget);
  if (least.ok()) limits.min_budget = *least;
  return limits;
}

worker::EngineOptions EngineOptionsOf(const WorkerRuntimeOptions& options,
                                      const LoadedModel& model,
                                      const std::vector<int32_t>& end_tokens) {
  const EngineFlags& flags = options.engine;
  worker::EngineOptions engine;
  engine.scheduler.max_model_len = static_cast<uint32_t>(model.max_model_len());
  engine.scheduler.max_num_seqs = static_cast<uint32_t>(flags.max_num_seqs);
  engine.scheduler.max_batched_tokens =
      static_cast<uint32_t>(flags.max_batched_tokens);
  engine.scheduler.max_queue = static_cast<uint32_t>(flags.max_queue);
  engine.scheduler.queue_timeout = flags.queue_timeout;
  engine.scheduler.eos_token_ids = end_tokens;
  engine.scheduler.vocab_size =
      static_cast<int32_t>(model.source().spec.vocab_size);
  engine.scheduler.eviction = EvictionLimitsOf(flags, model.source());
  engine.limits.vocab_size = engine.scheduler.vocab_size;
  engine.limits.max_model_len = engine.scheduler.max_model_len;
  engine.watchdog = flags.watchdog;
  engine.on_stall = [fatal =
                         options.on_fatal](const worker::StallReport& report) {
    base::LogError("no step finished in time",
                   {{"stalled", absl::FormatDuration(report.stalled)},
                    {"plan", base::LogWhole{report.plan}}});
    fatal("the engine stalled");
    // The engine's thread hangs, so exit without joining it. In the pause
    // before, routers and clients can notice the failure.
    absl::SleepFor(kStallGrace);
    std::_Exit(kExitFailed);
  };
  engine.on_failure = [fatal = options.on_fatal](const absl::Status& status) {
    base::LogError("the executor failed", {{"status", status.ToString()}});
    fatal(status.ToString());
  };
  return engine;
}

}  // namespace

absl::Status CheckStepFlags(const EngineFlags& flags,
                            const ModelOptions& model) {
  if (flags.max_batched_tokens < flags.max_num_seqs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max-batched-tokens ", flags.max_batched_tokens,
        " is less than --max-num-seqs ", flags.max_num_seqs,
        ": every running sequence decodes one token in each step"));
  }
  if (flags.gpu_memory_given && model.device.device == "cpu") {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu-memory-utilization ", flags.gpu_memory_utilization,
                     " is a share of a GPU's memory, but the device is "
                     "--device cpu: give --device cuda or "
                     "auto, or set --kv-cache-bytes instead"));
  }
  if (flags.cuda_graphs && model.device.device == "cpu") {
    return absl::InvalidArgumentError(
        "--cuda-graphs captures the steps of a GPU, but the "
        "device is --device cpu: give --device cuda or auto");
  }
  return absl::OkStatus();
}

LoadRequest LoadRequestOf(const ModelOptions& model, const EngineFlags& flags) {
  return {.model = model,
          .max_model_len = flags.max_model_len,
          .max_num_seqs = flags.max_num_seqs,
          .max_batched_tokens = flags.max_batched_tokens,
          .kv_cache_bytes = flags.kv_cache_bytes,
          .gpu_memory_utilization = flags.gpu_memory_utilization,
          .host_pool_bytes = flags.host_pool_bytes,
          .graphs = flags.cuda_graphs,
          .prefix_reuse = flags.prefix_caching};
}

RankConstants RankConstantsOf(const LoadedModel& model, plan::TpShard shard,
                              const std::string& collective) {
  return {.shard = shard,
          .collective = collective,
          .device = model.rank().device().name(),
          .weight_bytes = model.weight_bytes(),
          .weight_read_bytes = model.rank().read_bytes(),
          .kv_pool_bytes = model.kv_pool_bytes()};
}

// Returns an id of this worker's arithmetic. It contains the number of ranks
// and the collective, because they change how sums over ranks are rounded, and
// a hash of the plan's eviction, which the cache_id leaves out.
std::string WorkerRuntime::NumericsId() const {
  const std::string own =
      absl::StrCat(model_->rank().executor().numerics_id(),
                   EvictionId(model_->rank().plan().source));
  return group_ == nullptr ? own
                           : absl::StrCat(own, "-tp", group_->shard().size, "-",
                                          group_->collective_name());
}

NodeReport WorkerRuntime::Report() const {
  NodeReport report = {.grpc = target()};
  if (group_ != nullptr) report.ranks = group_->members();
  return report;
}

Node::MetricsSources WorkerRuntime::Metrics() const {
  if (group_ == nullptr) return {device_metrics_, metrics_->registry()};
  return {std::make_shared<OfRank>(0, device_metrics_), rank_metrics_,
          metrics_->registry()};
}

kvasir::v1::WorkerInfo WorkerRuntime::Info(
    const WorkerRuntimeOptions& options) const {
  kvasir::v1::WorkerInfo info;
  info.set_api_version("kvasir.v1");
  info.set_build(kVersion);
  info.set_weights_id(model_->rank().weights_id());
  info.set_cache_id(model_->rank().cache_id());
  const worker::ModelExecutor& executor = model_->rank().executor();
  info.set_numerics_id(NumericsId());
  info.set_lifts_prompts(executor.lifts_prompts());
  info.set_device(model_->rank().device().name());
  if (options.tokenizer != nullptr) {
    info.set_tokenizer_hash(options.tokenizer->hash());
  }
  info.set_page_tokens(static_cast<uint32_t>(model_->layout().page_tokens()));
  info.set_prefix_hash_version(cache::kPrefixHashVersion);
  info.set_model_name(model_->source().name);
  info.set_model_type(model_->source().spec.model_type);
  info.set_max_model_len(static_cast<uint32_t>(model_->max_model_len()));
  info.set_max_num_seqs(static_cast<uint32_t>(options.engine.max_num_seqs));
  info.set_max_n(std::min(worker::RequestLimits().max_n,
                          static_cast<uint32_t>(options.engine.max_num_seqs)));
  info.set_max_batched_tokens(
      static_cast<uint32_t>(options.engine.max_batched_tokens));
  info.set_vocab_size(static_cast<uint32_t>(model_->source().spec.vocab_size));
  for (const int32_t id : end_tokens_) info.add_eos_token_ids(id);
  info.set_total_pages(static_cast<uint64_t>(model_->total_pages()));
  info.set_kv_bytes_per_token(model_->kv_bytes_per_token());
  info.set_kv_compression_ratio(model_->kv_compression_ratio());
  return info;
}

absl::StatusOr<std::unique_ptr<WorkerRuntime>> WorkerRuntime::Create(
    WorkerRuntimeOptions options) {
  const EngineFlags& flags = options.engine;
  KVASIR_RETURN_IF_ERROR(CheckStepFlags(flags, options.model));
  auto runtime = std::unique_ptr<WorkerRuntime>(new WorkerRuntime());
  const absl::Time start = absl::Now();
  runtime->on_fatal_ = options.on_fatal;
  runtime->group_ = std::move(options.group);
  LeaderGroup* const group = runtime->group_.get();
  LoadRequest request = LoadRequestOf(options.model, flags);
  request.group = group;
  request.check = [&flags](const ModelSource& source) {
    return worker::CheckEvictionLimits(EvictionLimitsOf(flags, source));
  };
  request.progress = options.progress;
  KVASIR_ASSIGN_OR_RETURN(
      runtime->model_, LoadWithPlanCheck(options.tokenizer.get(),
                                         flags.plan_check, std::move(request)));
  LoadedModel& model = *runtime->model_;
  runtime->metrics_ = std::make_shared<worker::WorkerMetrics>(
      ConstantsOf(model),
      [&cache = model.cache(), &executor = model.rank().executor(),
       &before = runtime->warm_up_] {
        return SampleOf(cache.Stats(), executor.totals(), before);
      });
  const kernels::Device& device = model.rank().device();
  runtime->device_metrics_ = std::make_shared<DeviceMetrics>(
      &device, device.has_own_memory() ? flags.gpu_memory_utilization : 1);

  worker::Executor* executor = &model.rank().executor();
  if (group != nullptr) {
    KVASIR_RETURN_IF_ERROR(LogReplicas(model.source(), group->shard().size));
    runtime->rank_metrics_ = std::make_shared<RankMetrics>(
        RankConstantsOf(model, group->shard(), group->collective_name()),
        &group->collective());
    runtime->executor_ = group->MakeExecutor(executor);
    executor = runtime->executor_.get();
  }
  runtime->end_tokens_ =
      ChooseEndTokens(model.source().spec, options.tokenizer.get());
  worker::EngineOptions engine =
      EngineOptionsOf(options, model, runtime->end_tokens_);
  engine.observer = runtime->metrics_.get();
  KVASIR_ASSIGN_OR_RETURN(const double copy_rate,
                          model.rank().executor().MeasureCopyBytesPerSecond());
  if (copy_rate > 0) engine.scheduler.copy_bytes_per_second = copy_rate;
  KVASIR_ASSIGN_OR_RETURN(
      runtime->engine_,
      worker::Engine::Create(std::move(engine), &model.cache(), executor));
  KVASIR_RETURN_IF_ERROR(runtime->engine_->Start());
  // Set this before metrics are collected, because they subtract these counts.
  runtime->warm_up_ = {.executor = model.rank().executor().totals(),
                       .cache = model.cache().Stats()};
  runtime->engine_->SubscribeLoad(runtime->metrics_);
  worker::WorkerServerOptions server;
  KVASIR_ASSIGN_OR_RETURN(server.listen, options.listen());
  server.credentials = options.credentials;
  server.service.info = runtime->Info(options);
  KVASIR_ASSIGN_OR_RETURN(
      runtime->server_,
      worker::WorkerServer::Start(std::move(server), runtime->engine_.get()));
  runtime->server_->SetReady(true);
  base::LogInfo(
      "worker ready",
      {{"model", model.source().name},
       {"listen", runtime->server_->target()},
       {"weights", HumanBytes(static_cast<double>(model.weight_bytes()))},
       {"rounded_weights", HumanBytes(static_cast<double>(
                               model.rank().executor().rounded_bytes()))},
       {"kv_pool", HumanBytes(static_cast<double>(model.kv_pool_bytes()))},
       {"host_pool", HumanBytes(static_cast<double>(model.host_pool_bytes()))},
       {"kv_bytes_per_token", model.kv_bytes_per_token()},
       {"pages", model.total_pages()},
       {"invariance", InvarianceOf(model)},
       {"device", model.rank().device().name()},
       {"numerics", runtime->NumericsId()},
       {"threads", model.num_threads()},
       {"simd", kernels::CpuTargetName()},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  LogAttentionKernels(model.rank().executor());
  return runtime;
}

WorkerRuntime::~WorkerRuntime() {
  if (server_ != nullptr) server_->Shutdown(absl::Now() + absl::Seconds(1));
  if (engine_ != nullptr) engine_->Stop();
  if (rank_metrics_ != nullptr) rank_metrics_->Stop();
  if (device_metrics_ != nullptr) device_metrics_->Stop();
}

DrainOutcome WorkerRuntime::Drain(absl::Duration deadline) {
  const worker::DrainCounts counts =
      server_->Drain(base::Clock::Real().Now() + deadline);
  if (group_ != nullptr) {
    group_->EndLocalRanksIfFailed();
    // Stop the engine first, so that no step follows the drain of the group.
    engine_->Stop();
    if (const absl::Status status = group_->Drain(); !status.ok()) {
      on_fatal_(absl::StrCat("the group was not drained: ", status.ToString()));
    }
  }
  return {.finished = counts.finished, .aborted = counts.aborted};
}

}  // namespace kvasir::cli
