#include "worker/executor/model_executor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "kernels/rowwise/ops.h"
#include "kernels/sampling/ops.h"
#include "plan/plan.h"
#include "worker/program/prompt_lift.h"
#include "worker/weights/advance.h"

namespace kvasir::worker {
namespace {

using kernels::Workspace;
using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

// Ids of a history are uploaded so many at a time.
constexpr int64_t kHistoryChunk = 1024;

// Rows of int32 numbers are moved by the op that moves rows of float32: it
// copies bits.
float* AsFloats(int32_t* numbers) { return reinterpret_cast<float*>(numbers); }

// Takes `count` elements and fills them from `host`, which has as many unless
// the workspace only counts.
template <typename T>
absl::StatusOr<T*> Place(kernels::Stream& stream, const std::vector<T>& host,
                         int64_t count, Workspace& workspace) {
  T* const device = workspace.Take<T>(count);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  if (!workspace.counting()) {
    KVASIR_RETURN_IF_ERROR(
        kernels::Upload(stream, device, host.data(), host.size() * sizeof(T)));
  }
  return device;
}

bool HasPenalty(const SampleRequest& sample) {
  return sample.repetition_penalty() != 1.0f ||
         sample.presence_penalty() != 0.0f ||
         sample.frequency_penalty() != 0.0f;
}

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

struct ModelExecutor::Results {
  int32_t* not_finite = nullptr;
  float* logprobs = nullptr;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  float* target_logprobs = nullptr;
};

struct ModelExecutor::HostResults {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> target_logprobs;
  std::vector<int32_t> not_finite;
};

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
      batch_(limits_, arenas_) {}

absl::StatusOr<std::unique_ptr<ModelExecutor>> ModelExecutor::Create(
    const Parts& parts, ModelWeights weights, ModelExecutorOptions options) {
  KVASIR_RETURN_IF_ERROR(CheckParts(parts, options));
  KVASIR_ASSIGN_OR_RETURN(
      KvArenas arenas, KvArenas::Create(*parts.plan, *parts.layout, parts.pages,
                                        parts.allocator));
  std::unique_ptr<ModelExecutor> executor(new ModelExecutor(
      parts, std::move(weights), std::move(options), std::move(arenas)));
  KVASIR_RETURN_IF_ERROR(executor->CreateDecoder());
  executor->output_ = std::make_unique<StepOutput>(
      executor->decoder_.get(), executor->options_.max_batched_tokens,
      executor->options_.logits_bytes);
  KVASIR_RETURN_IF_ERROR(executor->CreateTables());
  KVASIR_RETURN_IF_ERROR(executor->PlanWorkspace());
  return executor;
}

absl::Status ModelExecutor::CreateDecoder() {
  KVASIR_ASSIGN_OR_RETURN(
      clamped_codes_,
      parts_.allocator->Allocate(sizeof(int64_t), kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*parts_.stream, clamped_codes_.data(),
                                         &totals_.clamped_codes,
                                         sizeof(int64_t)));
  KVASIR_ASSIGN_OR_RETURN(
      Decoder decoder,
      Decoder::Create({.spec = parts_.spec,
                       .weights = &weights_,
                       .arenas = &arenas_,
                       .collective = parts_.collective,
                       .page_tokens = parts_.layout->page_tokens(),
                       .profile = options_.profile,
                       .clamped_codes = clamped_codes_.as<int64_t>()},
                      parts_.allocator, parts_.stream));
  decoder_ = std::make_unique<Decoder>(std::move(decoder));
  const auto count = [this](const PartProgram& part) {
    if (part.static_ranges) static_codes_per_token_ += part.latent_columns;
  };
  for (int64_t layer = 0; layer < parts_.spec->num_layers(); ++layer) {
    const AttentionProgram& program =
        weights_.layers[static_cast<size_t>(layer)].attention;
    for (const KeyProgram& part : program.key) count(part);
    count(program.value);
  }
  FindLikeLayers();
  return absl::OkStatus();
}

void ModelExecutor::FindLikeLayers() {
  absl::flat_hash_map<std::string, size_t> known;
  for (int64_t layer = 0; layer < parts_.spec->num_layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    const std::string what = absl::StrCat(
        arenas_.layers()[index].page_group, " ",
        parts_.spec->layers[index].rope, " ",
        parts_.plan->layers(static_cast<int>(layer)).SerializeAsString());
    const auto [entry, is_new] = known.try_emplace(what, like_layers_.size());
    if (is_new) {
      like_layers_.push_back({.first = layer});
    } else {
      ++like_layers_[entry->second].count;
    }
  }
}

absl::Status ModelExecutor::CreateTables() {
  SequenceTableLimits limits;
  limits.max_sequences = options_.max_num_seqs;
  limits.max_model_len = options_.max_model_len;
  limits.page_tokens = parts_.layout->page_tokens();
  for (const cache::PageGroupLayout& group : parts_.layout->page_groups()) {
    limits.windows.push_back(group.sliding_window);
    limits.side_pages.push_back(group.side_pages_per_sequence);
  }
  KVASIR_ASSIGN_OR_RETURN(
      SequenceTable table,
      SequenceTable::Create(std::move(limits), &arenas_, parts_.allocator));
  table_ = std::make_unique<SequenceTable>(std::move(table));
  const int64_t sources =
      options_.max_batched_tokens + 2 * options_.max_num_seqs;
  KVASIR_ASSIGN_OR_RETURN(
      token_sources_,
      parts_.allocator->Allocate(static_cast<size_t>(sources) * sizeof(int32_t),
                                 kernels::MemoryTag::kOther));
  attention_.resize(static_cast<size_t>(arenas_.num_page_groups()));
  ring_slots_.resize(arenas_.rings().size());
  return absl::OkStatus();
}

absl::Status ModelExecutor::PlanWorkspace() {
  Workspace counter = Workspace::Counting();
  Results results;
  KVASIR_RETURN_IF_ERROR(RunStep(LargestStep(limits_), counter, &results));
  // Histories are counted before a step runs, in memory of their own time.
  const int64_t history_bytes =
      kHistoryChunk * static_cast<int64_t>(sizeof(int32_t));
  const size_t bytes =
      std::max(counter.peak_bytes(), static_cast<size_t>(history_bytes));
  KVASIR_ASSIGN_OR_RETURN(
      workspace_memory_,
      parts_.allocator->Allocate(bytes + Workspace::kAlignmentBytes,
                                 kernels::MemoryTag::kWorkspace));
  return absl::OkStatus();
}

bool ModelExecutor::lifts_prompts() const {
  return std::any_of(
      weights_.layers.begin(), weights_.layers.end(),
      [](const LayerWeights& layer) { return LiftsPrompts(layer.attention); });
}

std::string ModelExecutor::numerics_id() const {
  // Every CPU back end gives the same bits; a change of them is a new number.
  return lifts_prompts() ? "cpu-f32-2-lifted" : "cpu-f32-2";
}

int32_t* ModelExecutor::last_sampled() const {
  return token_sources_.as<int32_t>() + options_.max_batched_tokens;
}

int32_t* ModelExecutor::sampled_now() const {
  return last_sampled() + options_.max_num_seqs;
}

absl::StatusOr<StepResult> ModelExecutor::Execute(const StepPlan& plan) {
  if (!failure_.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("executor: an earlier step failed: ", failure_.message()));
  }
  const auto run = [&]() -> absl::StatusOr<StepResult> {
    KVASIR_RETURN_IF_ERROR(ApplyPlan(plan));
    const StepSizes sizes = batch_.sizes();
    if (sizes.tokens == 0) {
      StepResult empty;
      empty.set_step_id(plan.step_id());
      return empty;
    }
    Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
    Results results;
    KVASIR_RETURN_IF_ERROR(RunStep(sizes, workspace, &results));
    KVASIR_ASSIGN_OR_RETURN(StepResult read,
                            ReadResults(plan.step_id(), sizes, results));
    KVASIR_RETURN_IF_ERROR(CountStep(sizes.tokens));
    return read;
  };
  absl::StatusOr<StepResult> result = run();
  if (!result.ok()) {
    failure_ = result.status();
    parts_.collective->Abort(failure_);
  }
  return result;
}

absl::Status ModelExecutor::ApplyPlan(const StepPlan& plan) {
  if (plan.step_id() != last_step_id_ + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step plan: step id ", plan.step_id(), ", want ", last_step_id_ + 1));
  }
  last_step_id_ = plan.step_id();
  for (const uint64_t id : plan.released_sequences()) {
    KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PenaltyCounts> penalties,
                            table_->Release(id));
    if (penalties != nullptr) idle_penalties_.push_back(std::move(penalties));
  }
  Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
  KVASIR_RETURN_IF_ERROR(
      arenas_.Copy(*parts_.stream, plan.page_copies(), workspace));
  return batch_.Build(
      plan, table_.get(), *parts_.stream,
      [this](const SequenceStep& step, SequenceTable::Sequence* sequence,
             kernels::SampleRow* row) {
        return PrepareSample(step, sequence, row);
      });
}

absl::Status ModelExecutor::PrepareSample(const SequenceStep& step,
                                          SequenceTable::Sequence* sequence,
                                          kernels::SampleRow* row) {
  const std::string& name = step.sample().token_mask();
  if (!name.empty()) {
    const auto found = masks_.find(name);
    if (found == masks_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step plan: sequence ", step.sequence_id(),
                       ": token_mask: there is none of this name"));
    }
    row->allow_mask = found->second.as<uint32_t>();
  }
  return HasPenalty(step.sample()) ? PreparePenalties(step, sequence, row)
                                   : absl::OkStatus();
}

absl::Status ModelExecutor::PreparePenalties(const SequenceStep& step,
                                             SequenceTable::Sequence* sequence,
                                             kernels::SampleRow* row) {
  const SampleRequest& sample = step.sample();
  bool reset = sample.history_reset();
  if (sequence->penalties == nullptr) {
    reset = true;
    if (!idle_penalties_.empty()) {
      sequence->penalties = std::move(idle_penalties_.back());
      idle_penalties_.pop_back();
    } else {
      const size_t bytes =
          static_cast<size_t>(limits_.vocab_size) * sizeof(int32_t);
      auto counts = std::make_unique<PenaltyCounts>();
      KVASIR_ASSIGN_OR_RETURN(
          counts->prompt,
          parts_.allocator->Allocate(bytes, kernels::MemoryTag::kOther));
      KVASIR_ASSIGN_OR_RETURN(
          counts->output,
          parts_.allocator->Allocate(bytes, kernels::MemoryTag::kOther));
      sequence->penalties = std::move(counts);
    }
  }
  const PenaltyCounts& counts = *sequence->penalties;
  Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
  KVASIR_RETURN_IF_ERROR(CountHistory(sample.prompt_history(), reset,
                                      counts.prompt.as<int32_t>(), workspace));
  KVASIR_RETURN_IF_ERROR(CountHistory(sample.output_history(), reset,
                                      counts.output.as<int32_t>(), workspace));
  row->prompt_counts = counts.prompt.as<int32_t>();
  row->output_counts = counts.output.as<int32_t>();
  return absl::OkStatus();
}

absl::Status ModelExecutor::CountHistory(
    const google::protobuf::RepeatedField<int32_t>& ids, bool clear,
    int32_t* counts, Workspace& workspace) {
  Workspace::Scope scope(&workspace);
  int32_t* const chunk = workspace.Take<int32_t>(kHistoryChunk);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  kernels::CountTokensParams params;
  params.ids = chunk;
  params.counts = counts;
  params.vocab = limits_.vocab_size;
  params.clear = clear;
  int64_t begin = 0;
  do {
    params.num_ids = std::min<int64_t>(kHistoryChunk, ids.size() - begin);
    if (params.num_ids == 0 && !params.clear) break;
    KVASIR_RETURN_IF_ERROR(
        kernels::Upload(*parts_.stream, chunk, ids.data() + begin,
                        static_cast<size_t>(params.num_ids) * sizeof(int32_t)));
    KVASIR_RETURN_IF_ERROR(
        kernels::CountTokens(*parts_.stream, params, workspace));
    params.clear = false;
    begin += params.num_ids;
  } while (begin < ids.size());
  return absl::OkStatus();
}

absl::Status ModelExecutor::RunStep(const StepSizes& sizes,
                                    Workspace& workspace, Results* results) {
  kernels::Stream& stream = *parts_.stream;
  TokenBatch tokens;
  KVASIR_RETURN_IF_ERROR(PlaceTokens(sizes, workspace, &tokens));
  // Results outlive the scopes below.
  const std::vector<int32_t> none(static_cast<size_t>(sizes.tokens));
  KVASIR_ASSIGN_OR_RETURN(results->not_finite,
                          Place(stream, none, sizes.tokens, workspace));
  tokens.not_finite = results->not_finite;
  results->target_logprobs = workspace.Take<float>(sizes.targets);
  HiddenStates hidden;
  KVASIR_RETURN_IF_ERROR(decoder_->Run(stream, tokens, &hidden, workspace));
  if (options_.logits_tap) {
    KVASIR_RETURN_IF_ERROR(TapLogits(sizes, hidden, workspace));
  }
  KVASIR_RETURN_IF_ERROR(RunTargets(sizes, hidden, workspace, results));
  return RunSamples(sizes, hidden, workspace, results);
}

absl::Status ModelExecutor::PlaceTokens(const StepSizes& sizes,
                                        Workspace& workspace,
                                        TokenBatch* batch) {
  kernels::Stream& stream = *parts_.stream;
  batch->num_tokens = sizes.tokens;
  batch->num_sequences = sizes.sequences;
  batch->rows = batch_.rows();
  KVASIR_ASSIGN_OR_RETURN(batch->positions, Place(stream, batch_.positions(),
                                                  sizes.tokens, workspace));
  for (size_t group = 0; group < attention_.size(); ++group) {
    const StepBatch::Group& host = batch_.groups()[group];
    KVASIR_ASSIGN_OR_RETURN(attention_[group].slots,
                            Place(stream, host.slots, sizes.tokens, workspace));
    KVASIR_ASSIGN_OR_RETURN(
        attention_[group].sequences,
        Place(stream, host.sequences, sizes.sequences, workspace));
  }
  batch->groups = attention_;
  for (size_t ring = 0; ring < ring_slots_.size(); ++ring) {
    KVASIR_ASSIGN_OR_RETURN(
        ring_slots_[ring],
        Place(stream, batch_.ring_slots()[ring], sizes.tokens, workspace));
  }
  batch->ring_slots = ring_slots_;

  // Ids from the plan and from the last sample come together on the device.
  int32_t* const ids = workspace.Take<int32_t>(sizes.tokens);
  batch->ids = ids;
  KVASIR_ASSIGN_OR_RETURN(
      const int32_t* const sources,
      Place(stream, batch_.token_sources(), sizes.tokens, workspace));
  if (!workspace.counting()) {
    KVASIR_RETURN_IF_ERROR(
        kernels::Upload(stream, token_sources_.data(), batch_.ids().data(),
                        batch_.ids().size() * sizeof(int32_t)));
  }
  kernels::GatherRowsParams gather;
  gather.x = AsFloats(token_sources_.as<int32_t>());
  gather.x_row_stride = 1;
  gather.rows = sources;
  gather.out = AsFloats(ids);
  gather.out_row_stride = 1;
  gather.num_rows = sizes.tokens;
  gather.columns = 1;
  return kernels::GatherRows(stream, gather, workspace);
}

absl::Status ModelExecutor::TapLogits(const StepSizes& sizes,
                                      const HiddenStates& hidden,
                                      Workspace& workspace) {
  Workspace::Scope scope(&workspace);
  std::vector<int32_t> rows;
  std::vector<uint64_t> sequence_ids;
  if (!workspace.counting()) {
    for (const StepBatch::Output& output : batch_.outputs()) {
      sequence_ids.insert(sequence_ids.end(),
                          static_cast<size_t>(output.num_rows),
                          output.sequence_id);
    }
    for (int64_t row = 0; row < sizes.tokens; ++row) {
      rows.push_back(static_cast<int32_t>(row));
    }
  }
  KVASIR_ASSIGN_OR_RETURN(const int32_t* const device_rows,
                          Place(*parts_.stream, rows, sizes.tokens, workspace));
  const int64_t vocab = limits_.vocab_size;
  return output_->ReadAllLogits(
      *parts_.stream, hidden, device_rows, sizes.tokens,
      [&](int64_t first_row, absl::Span<const float> logits) {
        for (size_t at = 0; at < logits.size();
             at += static_cast<size_t>(vocab)) {
          const auto row =
              static_cast<size_t>(first_row) + at / static_cast<size_t>(vocab);
          options_.logits_tap({sequence_ids[row], batch_.positions()[row],
                               logits.subspan(at, static_cast<size_t>(vocab))});
        }
        return absl::OkStatus();
      },
      workspace);
}

absl::Status ModelExecutor::RunTargets(const StepSizes& sizes,
                                       const HiddenStates& hidden,
                                       Workspace& workspace, Results* results) {
  if (sizes.targets == 0) return absl::OkStatus();
  Workspace::Scope scope(&workspace);
  TargetBatch batch;
  batch.num_rows = sizes.targets;
  KVASIR_ASSIGN_OR_RETURN(
      batch.token_rows,
      Place(*parts_.stream, batch_.target_rows(), sizes.targets, workspace));
  KVASIR_ASSIGN_OR_RETURN(
      batch.target_ids,
      Place(*parts_.stream, batch_.target_ids(), sizes.targets, workspace));
  batch.logprobs = results->target_logprobs;
  return output_->ScoreTargets(*parts_.stream, hidden, batch, workspace);
}

absl::Status ModelExecutor::RunSamples(const StepSizes& sizes,
                                       const HiddenStates& hidden,
                                       Workspace& workspace, Results* results) {
  if (sizes.samples == 0) return absl::OkStatus();
  kernels::Stream& stream = *parts_.stream;
  SampleBatch batch;
  batch.num_rows = sizes.samples;
  batch.max_top = sizes.top;
  batch.token_ids = sampled_now();
  batch.logprobs = workspace.Take<float>(sizes.samples);
  batch.top_ids = workspace.Take<int32_t>(sizes.samples * sizes.top);
  batch.top_logprobs = workspace.Take<float>(sizes.samples * sizes.top);
  results->logprobs = batch.logprobs;
  results->top_ids = batch.top_ids;
  results->top_logprobs = batch.top_logprobs;

  KVASIR_ASSIGN_OR_RETURN(batch.token_rows, Place(stream, batch_.sample_rows(),
                                                  sizes.samples, workspace));
  KVASIR_ASSIGN_OR_RETURN(
      const int32_t* const bias_ids,
      Place(stream, batch_.bias_ids(), sizes.biases, workspace));
  KVASIR_ASSIGN_OR_RETURN(
      const float* const biases,
      Place(stream, batch_.biases(), sizes.biases, workspace));
  KVASIR_ASSIGN_OR_RETURN(
      const int32_t* const banned_ids,
      Place(stream, batch_.banned_ids(), sizes.banned, workspace));
  std::vector<kernels::SampleRow> rows;
  if (!workspace.counting()) {
    for (StepBatch::Sample& sample : batch_.samples()) {
      sample.row.bias_ids = bias_ids + sample.first_bias;
      sample.row.biases = biases + sample.first_bias;
      sample.row.banned_ids = banned_ids + sample.first_banned;
      rows.push_back(sample.row);
    }
  }
  KVASIR_ASSIGN_OR_RETURN(batch.rows,
                          Place(stream, rows, sizes.samples, workspace));
  KVASIR_RETURN_IF_ERROR(output_->Sample(stream, hidden, batch, workspace));
  return CarrySampled(workspace);
}

absl::Status ModelExecutor::CarrySampled(Workspace& workspace) {
  // last[row] = sampled now, or what it was.
  const int64_t count = options_.max_num_seqs;
  Workspace::Scope scope(&workspace);
  std::vector<int32_t> sources(static_cast<size_t>(count));
  for (int64_t row = 0; row < count; ++row) {
    sources[static_cast<size_t>(row)] = static_cast<int32_t>(row);
  }
  const std::vector<StepBatch::Sample>& samples = batch_.samples();
  for (size_t i = 0; i < samples.size(); ++i) {
    sources[static_cast<size_t>(samples[i].table_row)] =
        static_cast<int32_t>(count + static_cast<int64_t>(i));
  }
  KVASIR_ASSIGN_OR_RETURN(const int32_t* const rows,
                          Place(*parts_.stream, sources, count, workspace));
  int32_t* const merged = workspace.Take<int32_t>(count);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  kernels::GatherRowsParams gather;
  gather.x = AsFloats(last_sampled());
  gather.x_row_stride = 1;
  gather.rows = rows;
  gather.out = AsFloats(merged);
  gather.out_row_stride = 1;
  gather.num_rows = count;
  gather.columns = 1;
  KVASIR_RETURN_IF_ERROR(
      kernels::GatherRows(*parts_.stream, gather, workspace));
  gather.x = AsFloats(merged);
  gather.rows = nullptr;
  gather.out = AsFloats(last_sampled());
  return kernels::GatherRows(*parts_.stream, gather, workspace);
}

kvasir::v1::SequenceFault ModelExecutor::FaultOf(
    const StepBatch::Output& output, int64_t first_row,
    const HostResults& host) {
  const auto row = host.not_finite.begin() + first_row;
  if (std::find(row, row + output.num_rows, 1) != row + output.num_rows) {
    return kvasir::v1::LATENT_NOT_FINITE;
  }
  const auto target = host.target_logprobs.begin() + output.first_target;
  const bool sound =
      (output.sample < 0 ||
       host.token_ids[static_cast<size_t>(output.sample)] !=
           kernels::kLogitNotFinite) &&
      std::all_of(target, target + output.num_targets,
                  [](float logprob) { return std::isfinite(logprob); });
  return sound ? kvasir::v1::SEQUENCE_FAULT_UNSPECIFIED
               : kvasir::v1::LOGIT_NOT_FINITE;
}

absl::StatusOr<StepResult> ModelExecutor::ReadResults(uint64_t step_id,
                                                      const StepSizes& sizes,
                                                      const Results& results) {
  HostResults host;
  const auto read = [this](auto* out, const auto* device,
                           int64_t count) -> absl::Status {
    out->resize(static_cast<size_t>(count));
    return kernels::ReadBack(*parts_.stream, out->data(), device,
                             out->size() * sizeof(*device));
  };
  KVASIR_RETURN_IF_ERROR(read(&host.token_ids, sampled_now(), sizes.samples));
  KVASIR_RETURN_IF_ERROR(read(&host.logprobs, results.logprobs, sizes.samples));
  KVASIR_RETURN_IF_ERROR(
      read(&host.top_ids, results.top_ids, sizes.samples * sizes.top));
  KVASIR_RETURN_IF_ERROR(read(&host.top_logprobs, results.top_logprobs,
                              sizes.samples * sizes.top));
  KVASIR_RETURN_IF_ERROR(
      read(&host.target_logprobs, results.target_logprobs, sizes.targets));
  KVASIR_RETURN_IF_ERROR(
      read(&host.not_finite, results.not_finite, sizes.tokens));

  StepResult out;
  out.set_step_id(step_id);
  int64_t first_row = 0;
  for (const StepBatch::Output& output : batch_.outputs()) {
    kvasir::v1::SequenceResult* const result = out.add_sequences();
    result->set_sequence_id(output.sequence_id);
    result->set_token_id(kernels::kNoTokenAllowed);
    result->set_fault(FaultOf(output, first_row, host));
    first_row += output.num_rows;
    if (result->fault() != kvasir::v1::SEQUENCE_FAULT_UNSPECIFIED) continue;
    const auto first = host.target_logprobs.begin() + output.first_target;
    result->mutable_target_logprobs()->Add(first, first + output.num_targets);
    if (output.sample < 0) continue;
    const auto sample = static_cast<size_t>(output.sample);
    result->set_token_id(host.token_ids[sample]);
    result->set_logprob(host.logprobs[sample]);
    const int32_t num_top = batch_.samples()[sample].row.num_logprobs;
    for (int32_t i = 0; i < num_top; ++i) {
      const size_t at =
          sample * static_cast<size_t>(sizes.top) + static_cast<size_t>(i);
      kvasir::v1::TopLogprob* const top = result->add_top();
      top->set_token_id(host.top_ids[at]);
      top->set_logprob(host.top_logprobs[at]);
    }
  }
  return out;
}

absl::Status ModelExecutor::CountStep(int64_t num_tokens) {
  for (const LikeLayers& layers : like_layers_) {
    const auto group = static_cast<size_t>(
        arenas_.layers()[static_cast<size_t>(layers.first)].page_group);
    const LayerAttention::SlotWork work = decoder_->WorkOn(
        layers.first, batch_.groups()[group].sequences, batch_.rows());
    const auto count = static_cast<double>(layers.count);
    totals_.reconstruction_flops +=
        count * (work.rebuild_flops + work.prompt_lift_flops);
    totals_.prompt_lift_flops += count * work.prompt_lift_flops;
  }
  if (static_codes_per_token_ == 0) return absl::OkStatus();
  totals_.static_codes += static_codes_per_token_ * num_tokens;
  return kernels::ReadBack(*parts_.stream, &totals_.clamped_codes,
                           clamped_codes_.data(), sizeof(int64_t));
}

absl::Status ModelExecutor::RegisterTokenMask(
    std::string name, absl::Span<const uint32_t> allowed) {
  const size_t words = static_cast<size_t>((limits_.vocab_size + 31) / 32);
  if (name.empty() || allowed.size() != words) {
    return absl::InvalidArgumentError(
        absl::StrCat("token mask: want a name and ", words, " words, have ",
                     allowed.size()));
  }
  KVASIR_ASSIGN_OR_RETURN(
      kernels::DeviceBuffer buffer,
      parts_.allocator->Allocate(words * sizeof(uint32_t),
                                 kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*parts_.stream, buffer.data(),
                                         allowed.data(), buffer.bytes()));
  masks_[std::move(name)] = std::move(buffer);
  return absl::OkStatus();
}

void ModelExecutor::UnregisterTokenMask(const std::string& name) {
  masks_.erase(name);
}

}  // namespace kvasir::worker
