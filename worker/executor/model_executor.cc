#include "worker/executor/model_executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "plan/resolved_plan.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {
namespace {

using kernels::Workspace;

absl::Status CheckParts(const ModelExecutor::Parts& parts,
                        const ModelExecutorOptions& options) {
  if (options.max_batched_tokens < options.max_num_seqs ||
      options.max_num_seqs < 1 || options.max_model_len < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "executor: want max_batched_tokens >= max_num_seqs >= 1 and "
        "max_model_len >= 1, have ",
        options.max_batched_tokens, ", ", options.max_num_seqs, ", ",
        options.max_model_len));
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
                     " layers, the model ", parts.spec->layers.size()));
  }
  if (parts.layout->shard() != parts.collective->shard()) {
    return absl::InvalidArgumentError(
        "executor: layout and collective are of different ranks");
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t window =
        parts.layout->page_group(layers[i].page_group).sliding_window;
    if (window != parts.spec->layers[i].sliding_window) {
      return absl::InvalidArgumentError(absl::StrCat(
          "executor: layer ", i, ": its page group has window ", window,
          ", the model ", parts.spec->layers[i].sliding_window));
    }
  }
  return absl::OkStatus();
}

}  // namespace

ModelExecutor::ModelExecutor(const Parts& parts, ModelWeights weights,
                             ModelExecutorOptions options, KvArenas arenas)
    : parts_(parts),
      options_(std::move(options)),
      limits_{.max_batched_tokens = options_.max_batched_tokens,
              .max_sequences = options_.max_num_seqs,
              .vocab_size = parts.spec->vocab_size,
              .max_logprobs =
                  std::min(options_.max_logprobs, parts.spec->vocab_size)},
      weights_(std::move(weights)),
      arenas_(std::move(arenas)),
      batch_(limits_, arenas_, parts.plan->query_heads.count),
      blob_(&parts.device->allocator()) {}

ModelExecutor::~ModelExecutor() = default;

absl::StatusOr<std::unique_ptr<ModelExecutor>> ModelExecutor::Create(
    const Parts& parts, ModelWeights weights, ModelExecutorOptions options) {
  KVASIR_RETURN_IF_ERROR(CheckParts(parts, options));
  KVASIR_ASSIGN_OR_RETURN(
      KvArenas arenas,
      KvArenas::Create(*parts.plan, *parts.layout, parts.pages,
                       &parts.device->allocator(), parts.host_pages));
  std::unique_ptr<ModelExecutor> executor(new ModelExecutor(
      parts, std::move(weights), std::move(options), std::move(arenas)));
  KVASIR_RETURN_IF_ERROR(executor->CreateState());
  KVASIR_RETURN_IF_ERROR(executor->CreateDecoder());
  executor->output_ = std::make_unique<StepOutput>(
      executor->decoder_.get(), executor->options_.max_batched_tokens,
      executor->options_.logits_bytes);
  KVASIR_RETURN_IF_ERROR(executor->CreateTable());
  KVASIR_RETURN_IF_ERROR(executor->PlanWorkspace());
  KVASIR_RETURN_IF_ERROR(executor->ReserveBlob());
  if (executor->WantsGraphs()) {
    executor->graphs_ = std::make_unique<StepGraphs>();
  }
  return executor;
}

absl::Status ModelExecutor::CreateState() {
  constexpr int64_t kAlignmentBytes = 64;
  const int64_t numbers = options_.max_batched_tokens + options_.max_num_seqs;
  const auto bytes = numbers * static_cast<int64_t>(sizeof(int32_t));
  results_offset_bytes_ =
      (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  const ResultLayout largest(LargestStep(limits_));
  host_results_.resize(static_cast<size_t>(largest.bytes));
  KVASIR_ASSIGN_OR_RETURN(
      state_, parts_.device->allocator().Allocate(
                  static_cast<size_t>(results_offset_bytes_ + largest.bytes),
                  kernels::MemoryTag::kOther));
  staged_.groups.resize(static_cast<size_t>(arenas_.num_page_groups()));
  staged_.ring_slots.resize(arenas_.rings().size());
  return kernels::Upload(*parts_.stream, results() + largest.clamped_codes,
                         &totals_.clamped_codes, sizeof(int64_t));
}

absl::Status ModelExecutor::CreateDecoder() {
  const auto clamped_codes =
      (results() + staged_.layout.clamped_codes).as<int64_t>();
  KVASIR_ASSIGN_OR_RETURN(
      Decoder decoder,
      Decoder::Create({.spec = parts_.spec,
                       .weights = &weights_,
                       .arenas = &arenas_,
                       .collective = parts_.collective,
                       .page_tokens = parts_.layout->page_tokens(),
                       .prompts_as_rows = options_.prompts_as_rows,
                       .max_tokens = options_.max_batched_tokens,
                       .plan = parts_.plan,
                       .mass = RoomForMass(MassLimits()),
                       .profile = options_.profile,
                       .clamped_codes = clamped_codes},
                      parts_.device));
  decoder_ = std::make_unique<Decoder>(std::move(decoder));
  const auto count = [this](const PartProgram& part) {
    if (part.static_ranges) static_codes_per_token_ += part.latent_columns;
  };
  for (int64_t layer = 0; layer < parts_.spec->num_layers(); ++layer) {
    const AttentionProgram& program =
        *weights_.layers[static_cast<size_t>(layer)].attention;
    lifts_prompts_ = lifts_prompts_ || LiftsPrompts(program);
    for (const KeyProgram& part : program.key) count(part);
    if (!program.joint) count(program.value);
  }
  FindLikeLayers();
  scores_.resize(static_cast<size_t>(arenas_.num_page_groups()));
  for (int64_t layer = 0; layer < parts_.plan->num_layers(); ++layer) {
    const auto& eviction = parts_.plan->layer(layer).eviction;
    if (!eviction.has_value() || !eviction->scored) continue;
    scores_[static_cast<size_t>(
        arenas_.layers()[static_cast<size_t>(layer)].page_group)] = true;
  }
  return absl::OkStatus();
}

MassRoomLimits ModelExecutor::MassLimits() const {
  return LimitsInPool({.max_batched_tokens = options_.max_batched_tokens,
                       .max_num_seqs = options_.max_num_seqs,
                       .most_slots = options_.max_model_len},
                      *parts_.plan, *parts_.layout, arenas_.num_pages());
}

void ModelExecutor::FindLikeLayers() {
  absl::flat_hash_map<std::pair<int, int>, size_t> known;
  for (int64_t layer = 0; layer < parts_.spec->num_layers(); ++layer) {
    const plan::ResolvedLayer& resolved = parts_.plan->layer(layer);
    const auto [entry, is_new] = known.try_emplace(
        {resolved.page_group, resolved.attention}, like_layers_.size());
    if (is_new) {
      like_layers_.push_back({.first = layer});
    } else {
      ++like_layers_[entry->second].count;
    }
  }
}

absl::Status ModelExecutor::CreateTable() {
  SequenceTableLimits limits;
  limits.max_sequences = options_.max_num_seqs;
  limits.max_model_len = options_.max_model_len;
  limits.page_tokens = parts_.layout->page_tokens();
  for (const cache::PageGroupLayout& group : parts_.layout->page_groups()) {
    limits.windows.push_back(group.sliding_window);
    limits.side_pages.push_back(group.side_pages_per_sequence);
  }
  KVASIR_ASSIGN_OR_RETURN(SequenceTable table,
                          SequenceTable::Create(std::move(limits), &arenas_));
  table_ = std::make_unique<SequenceTable>(std::move(table));
  evictions_ = std::make_unique<SlotEvictions>(*parts_.plan, arenas_,
                                               MassLimits().most_slots);
  return absl::OkStatus();
}

// For the largest bucket, copies of a page of every sequence and group, tables
// of the greatest length and one history of it: the blob grows for more of them
// and for lists of biases and banned ids.
absl::Status ModelExecutor::ReserveBlob() {
  staged_.bucket.padded = LargestStep(limits_);
  blob_.StartCounting();
  Pack();
  const SequenceTableLimits& limits = table_->limits();
  const int64_t longest = limits.max_model_len / limits.page_tokens + 1;
  int64_t most_pages = 0;
  for (size_t group = 0; group < limits.side_pages.size(); ++group) {
    const int64_t pages = std::min(longest, arenas_.num_pages()[group]);
    most_pages = std::max(most_pages, pages);
    blob_.Take<kernels::PagePair>(2 * limits.max_sequences);  // padded
    blob_.Take<int32_t>(limits.max_sequences *
                        (pages + limits.side_pages[group]));
  }
  blob_.Take<int32_t>(
      std::min(limits.max_model_len, most_pages * limits.page_tokens));
  KVASIR_RETURN_IF_ERROR(blob_.StartPacking());
  return parts_.stream->ReserveCopies(
      std::max(blob_.bytes(), host_results_.size()));
}

// All ops that steps may launch are among those that are counted, and one that
// the device does not have says so here, before the first step.
absl::Status ModelExecutor::PlanWorkspace() {
  StagedStep largest;
  largest.sizes = LargestStep(limits_);
  largest.bucket.padded = largest.sizes;
  largest.groups.resize(staged_.groups.size());
  largest.ring_slots.resize(staged_.ring_slots.size());
  const std::vector<EvictionBatch> evictions = evictions_->LargestBatches();
  largest.bucket.evictions.assign(evictions.begin(), evictions.end());
  // Page copies take no workspace, but a device may have no kernel for them.
  largest.bucket.copies.emplace_back();
  Workspace counter = Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(Launch(largest, counter));
  KVASIR_ASSIGN_OR_RETURN(workspace_memory_,
                          parts_.device->allocator().Allocate(
                              counter.peak_bytes() + Workspace::kAlignmentBytes,
                              kernels::MemoryTag::kWorkspace));
  return absl::OkStatus();
}

double ModelExecutor::kv_compression_ratio() const {
  return static_cast<double>(layout().dense_bf16_bytes_per_token()) /
         kv_bytes_per_token();
}

std::string ModelExecutor::numerics_id() const {
  // Every CPU back end gives the same bits; a change of them is a new number,
  // and so it is of another device's.
  constexpr int kCpuBits = 2;
  constexpr int kGpuBits = 2;
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
    return absl::FailedPreconditionError("executor: a step is in flight");
  }
  if (absl::Status staged = Stage(plan); !staged.ok()) return Fail(staged);
  in_flight_ = true;
  const absl::Status launched = LaunchStep();
  return launched.ok() ? launched : Fail(launched);
}

absl::StatusOr<kvasir::v1::StepResult> ModelExecutor::Await() {
  if (!failure_.ok() || !in_flight_) {
    return absl::FailedPreconditionError("executor: no step is in flight");
  }
  in_flight_ = false;
  absl::StatusOr<kvasir::v1::StepResult> result = Collect();
  // What a dead group leaves behind is no result.
  absl::Status group = parts_.collective->status();
  if (!group.ok()) return Fail(group);
  if (!result.ok()) return Fail(result.status());
  return result;
}

absl::Status ModelExecutor::RegisterTokenMask(
    std::string name, absl::Span<const uint32_t> allowed) {
  if (in_flight_) {
    return absl::FailedPreconditionError("token mask: a step is in flight");
  }
  const size_t words = static_cast<size_t>((limits_.vocab_size + 31) / 32);
  if (name.empty() || allowed.size() != words) {
    return absl::InvalidArgumentError(
        absl::StrCat("token mask: want a name and ", words, " words, have ",
                     allowed.size()));
  }
  KVASIR_ASSIGN_OR_RETURN(
      kernels::DeviceBuffer buffer,
      parts_.device->allocator().Allocate(words * sizeof(uint32_t),
                                          kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*parts_.stream, buffer.data(),
                                         allowed.data(), buffer.bytes()));
  masks_[std::move(name)] = std::move(buffer);
  return absl::OkStatus();
}

}  // namespace kvasir::worker
