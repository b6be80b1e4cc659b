#include "worker/executor/model_executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plan/resolved_plan.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {
namespace {

absl::Status CheckParts(const ModelExecutor::Parts& parts,
                        const ModelExecutorOptions& options) {
  if (options.max_batched_tokens < options.max_num_seqs ||
      options.max_num_seqs < 1 || options.max_model_len < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "executor: max_batched_tokens is ", options.max_batched_tokens,
        ", max_num_seqs is ", options.max_num_seqs, " and max_model_len is ",
        options.max_model_len,
        "; all must be at least 1, and max_batched_tokens at least "
        "max_num_seqs"));
  }
  if (parts.spec->learned_positions &&
      options.max_model_len > parts.spec->max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("executor: a max_model_len of ", options.max_model_len,
                     " is more than the ", parts.spec->max_position_embeddings,
                     " positions that the model has learned"));
  }
  const auto& layers = parts.layout->layers();
  if (layers.size() != parts.spec->layers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("executor: the layout has ", layers.size(),
                     " layers, but the model has ", parts.spec->layers.size()));
  }
  if (parts.layout->shard() != parts.collective->shard()) {
    return absl::InvalidArgumentError(
        "executor: the page layout and the collective are those of different "
        "tensor-parallel ranks");
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t window =
        parts.layout->page_group(layers[i].page_group).sliding_window;
    if (window != parts.spec->layers[i].sliding_window) {
      return absl::InvalidArgumentError(
          absl::StrCat("executor: layer ", i, ": the sliding window is ",
                       window, " in the page layout, but ",
                       parts.spec->layers[i].sliding_window, " in the model"));
    }
  }
  return absl::OkStatus();
}

StepLimits LimitsOf(const model::DecoderSpec& spec,
                    const ModelExecutorOptions& options) {
  return {.max_batched_tokens = options.max_batched_tokens,
          .max_sequences = options.max_num_seqs,
          .vocab_size = spec.vocab_size,
          .max_logprobs = std::min(options.max_logprobs, spec.vocab_size),
          .num_experts = spec.experts.count};
}

}  // namespace

ModelExecutor::ModelExecutor(const Parts& parts, ModelWeights weights,
                             ModelExecutorOptions options, KvArenas arenas,
                             StepState state)
    : parts_(parts),
      options_(std::move(options)),
      limits_(LimitsOf(*parts.spec, options_)),
      weights_(std::move(weights)),
      arenas_(std::move(arenas)),
      state_(std::move(state)) {}

ModelExecutor::~ModelExecutor() = default;

absl::StatusOr<std::unique_ptr<ModelExecutor>> ModelExecutor::Create(
    const Parts& parts, ModelWeights weights, ModelExecutorOptions options) {
  KVASIR_RETURN_IF_ERROR(CheckParts(parts, options));
  KVASIR_ASSIGN_OR_RETURN(
      KvArenas arenas,
      KvArenas::Create(*parts.plan, *parts.layout, parts.pages,
                       &parts.device->allocator(), parts.host_pages));
  KVASIR_ASSIGN_OR_RETURN(
      StepState state,
      StepState::Create(LimitsOf(*parts.spec, options),
                        &parts.device->allocator(), *parts.stream));
  std::unique_ptr<ModelExecutor> executor(
      new ModelExecutor(parts, std::move(weights), std::move(options),
                        std::move(arenas), std::move(state)));
  KVASIR_RETURN_IF_ERROR(executor->CreateDecoder());
  KVASIR_RETURN_IF_ERROR(executor->CreateStepParts());
  return executor;
}

absl::Status ModelExecutor::CreateDecoder() {
  KVASIR_ASSIGN_OR_RETURN(
      Decoder decoder,
      Decoder::Create(
          {.spec = parts_.spec,
           .weights = &weights_,
           .arenas = &arenas_,
           .collective = parts_.collective,
           .page_tokens = parts_.layout->page_tokens(),
           .prompts_as_rows = options_.prompts_as_rows,
           .max_tokens = options_.max_batched_tokens,
           .plan = parts_.plan,
           .mass = RoomForMass(MassLimits()),
           .profile = options_.profile,
           .key_tap = options_.key_tap ? &options_.key_tap : nullptr,
           .clamped_codes = state_.clamped_codes(),
           .expert_load = state_.expert_load()},
          parts_.device));
  decoder_ = std::make_unique<Decoder>(std::move(decoder));
  for (const LayerWeights& layer : weights_.layers) {
    lifts_prompts_ = lifts_prompts_ || LiftsPrompts(*layer.attention);
  }
  return absl::OkStatus();
}

absl::Status ModelExecutor::CreateStepParts() {
  launcher_ = std::make_unique<Launcher>(
      Launcher::Parts{.stream = parts_.stream,
                      .collective = parts_.collective,
                      .arenas = &arenas_,
                      .decoder = decoder_.get(),
                      .state = &state_,
                      .totals = &totals_,
                      .limits = limits_,
                      .logits_bytes = options_.logits_bytes,
                      .logits_tap = options_.logits_tap,
                      .graphs = options_.graphs && !options_.key_tap});
  KVASIR_ASSIGN_OR_RETURN(
      stager_, Stager::Create({.device = parts_.device,
                               .stream = parts_.stream,
                               .plan = parts_.plan,
                               .layout = parts_.layout,
                               .arenas = &arenas_,
                               .decoder = decoder_.get(),
                               .state = &state_,
                               .limits = limits_,
                               .max_model_len = options_.max_model_len,
                               .most_slots = MassLimits().most_slots,
                               .logits_rows = launcher_->logits_rows(),
                               .lifts_prompts = lifts_prompts_,
                               .taps_logits = options_.logits_tap != nullptr}));
  collector_ =
      std::make_unique<Collector>(Collector::Parts{.stream = parts_.stream,
                                                   .arenas = &arenas_,
                                                   .decoder = decoder_.get(),
                                                   .state = &state_,
                                                   .totals = &totals_,
                                                   .limits = limits_},
                                  weights_, *parts_.plan);
  KVASIR_RETURN_IF_ERROR(launcher_->AllocateWorkspace(
      stager_->LargestStepToCount(), &parts_.device->allocator()));
  KVASIR_ASSIGN_OR_RETURN(const size_t blob_bytes, stager_->ReserveBlob());
  return parts_.stream->ReserveCopies(
      std::max(blob_bytes, collector_->results_bytes()));
}

MassRoomLimits ModelExecutor::MassLimits() const {
  return LimitsInPool({.max_batched_tokens = options_.max_batched_tokens,
                       .max_num_seqs = options_.max_num_seqs,
                       .most_slots = options_.max_model_len},
                      *parts_.plan, *parts_.layout, arenas_.num_pages());
}

double ModelExecutor::kv_compression_ratio() const {
  return static_cast<double>(layout().dense_bf16_bytes_per_token()) /
         kv_bytes_per_token();
}

std::string ModelExecutor::numerics_id() const {
  // Increase kCpuBits or kGpuBits when a change of the code changes results.
  // All CPU back ends give the same bits.
  constexpr int kCpuBits = 3;
  constexpr int kGpuBits = 3;
  const kernels::Device& device = *parts_.device;
  return absl::StrCat(
      device.numerics(), "-",
      absl::AsciiStrToLower(kernels::DTypeName(device.activations())), "-",
      device.kind() == kernels::DeviceKind::kCpu ? kCpuBits : kGpuBits,
      lifts_prompts() ? "-lifted" : "", prompts_are_rows() ? "" : "-fast");
}

absl::Status ModelExecutor::Fail(const absl::Status& status) {
  failure_ = status;
  parts_.collective->Abort(failure_);
  return status;
}

absl::Status ModelExecutor::Enqueue(const kvasir::v1::StepPlan& plan) {
  if (!failure_.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("executor: an earlier step failed: ", failure_.message()));
  }
  if (in_flight_) {
    return absl::FailedPreconditionError(
        "executor: a step is in flight; await it before the next one");
  }
  if (absl::Status staged = stager_->Stage(plan); !staged.ok()) {
    return Fail(staged);
  }
  in_flight_ = true;
  const absl::Status launched = launcher_->Launch(stager_->staged());
  return launched.ok() ? launched : Fail(launched);
}

absl::StatusOr<kvasir::v1::StepResult> ModelExecutor::Await() {
  if (!failure_.ok() || !in_flight_) {
    return absl::FailedPreconditionError(
        "executor: no step is in flight, or a step has failed");
  }
  in_flight_ = false;
  absl::StatusOr<kvasir::v1::StepResult> result =
      collector_->Collect(stager_->staged());
  // If the group has failed, the results in memory are not valid.
  absl::Status group = parts_.collective->status();
  if (!group.ok()) return Fail(group);
  if (!result.ok()) return Fail(result.status());
  return result;
}

absl::Status ModelExecutor::RegisterTokenMask(
    std::string name, absl::Span<const uint32_t> allowed) {
  if (in_flight_) {
    return absl::FailedPreconditionError(
        "token mask: a mask cannot be registered while a step is in flight");
  }
  return stager_->RegisterTokenMask(std::move(name), allowed);
}

}  // namespace kvasir::worker
