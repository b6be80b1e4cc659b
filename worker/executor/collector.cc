#include "worker/executor/collector.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "kernels/sampling/sample.h"

namespace kvasir::worker {

using kvasir::v1::StepResult;

Collector::Collector(const Parts& parts, const ModelWeights& weights,
                     const plan::ResolvedPlan& plan)
    : parts_(parts),
      scores_(static_cast<size_t>(parts.arenas->num_page_groups())),
      load_bytes_(static_cast<size_t>(parts.limits.num_experts) *
                  sizeof(int64_t)),
      host_results_(
          load_bytes_ +
          static_cast<size_t>(ResultLayout(LargestStep(parts.limits)).bytes)) {
  parts_.totals->expert_tokens.resize(
      static_cast<size_t>(parts.limits.num_experts));
  const auto count_codes = [this](const PartProgram& part) {
    if (part.static_ranges) static_codes_per_token_ += part.latent_columns;
  };
  absl::flat_hash_map<std::pair<int, int>, size_t> known;
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    const AttentionProgram& program = *weights.layers[index].attention;
    for (const KeyProgram& part : program.key) count_codes(part);
    if (!program.joint) count_codes(program.value);
    const plan::ResolvedLayer& resolved = plan.layer(layer);
    if (resolved.eviction.has_value() && resolved.eviction->scored) {
      scores_[static_cast<size_t>(parts.arenas->layers()[index].page_group)] =
          true;
    }
    const auto [entry, is_new] = known.try_emplace(
        {resolved.page_group, resolved.attention}, like_layers_.size());
    if (is_new) {
      like_layers_.push_back({.first = layer});
    } else {
      ++like_layers_[entry->second].count;
    }
  }
}

absl::StatusOr<StepResult> Collector::Collect(const StagedStep& step) {
  if (step.sizes.tokens > 0) {
    KVASIR_RETURN_IF_ERROR(kernels::ReadBack(
        *parts_.stream, host_results_.data(),
        parts_.state->expert_load().as<const std::byte>(),
        load_bytes_ + static_cast<size_t>(step.layout.bytes)));
    parts_.totals->clamped_codes =
        ResultAt<int64_t>(step.layout.clamped_codes, 0);
    if (load_bytes_ > 0) {
      std::memcpy(parts_.totals->expert_tokens.data(), host_results_.data(),
                  load_bytes_);
    }
  } else {
    KVASIR_RETURN_IF_ERROR(parts_.stream->Synchronize());
  }
  CountStep(step);
  return ResultOf(step);
}

template <typename T>
T Collector::ResultAt(int64_t offset_bytes, int64_t index) const {
  T number;
  std::memcpy(&number,
              host_results_.data() + load_bytes_ +
                  static_cast<size_t>(offset_bytes) +
                  static_cast<size_t>(index) * sizeof(T),
              sizeof(T));
  return number;
}

kvasir::v1::SequenceFault Collector::FaultOf(const StagedStep& step,
                                             const StepBatch::Output& output,
                                             int64_t first_row) const {
  for (int64_t row = first_row; row < first_row + output.num_rows; ++row) {
    if (ResultAt<float>(step.layout.not_finite, row) != 0.0f) {
      return kvasir::v1::LATENT_NOT_FINITE;
    }
  }
  bool sound = output.sample < 0 ||
               ResultAt<int32_t>(step.layout.token_ids, output.sample) !=
                   kernels::kLogitNotFinite;
  for (int64_t i = 0; i < output.num_targets; ++i) {
    sound &= std::isfinite(
        ResultAt<float>(step.layout.target_logprobs, output.first_target + i));
  }
  return sound ? kvasir::v1::SEQUENCE_FAULT_UNSPECIFIED
               : kvasir::v1::LOGIT_NOT_FINITE;
}

StepResult Collector::ResultOf(const StagedStep& step) const {
  StepResult out;
  out.set_step_id(step.step_id);
  int64_t first_row = 0;
  for (const StepBatch::Output& output : step.batch->outputs()) {
    kvasir::v1::SequenceResult* const result = out.add_sequences();
    result->set_sequence_id(output.sequence_id);
    result->set_token_id(kernels::kNoTokenAllowed);
    result->set_fault(FaultOf(step, output, first_row));
    first_row += output.num_rows;
    if (result->fault() != kvasir::v1::SEQUENCE_FAULT_UNSPECIFIED) continue;
    for (int64_t i = 0; i < output.num_targets; ++i) {
      result->add_target_logprobs(ResultAt<float>(step.layout.target_logprobs,
                                                  output.first_target + i));
    }
    if (output.sample < 0) continue;
    const int64_t sample = output.sample;
    result->set_token_id(ResultAt<int32_t>(step.layout.token_ids, sample));
    result->set_logprob(ResultAt<float>(step.layout.logprobs, sample));
    const int32_t num_top =
        step.batch->samples()[static_cast<size_t>(sample)].row.num_logprobs;
    for (int32_t i = 0; i < num_top; ++i) {
      const int64_t at = sample * step.bucket.padded.top + i;
      kvasir::v1::TopLogprob* const top = result->add_top();
      top->set_token_id(ResultAt<int32_t>(step.layout.top_ids, at));
      top->set_logprob(ResultAt<float>(step.layout.top_logprobs, at));
    }
  }
  return out;
}

int64_t& Collector::ScoredTokens(ScoringKind kind) {
  switch (kind) {
    case ScoringKind::kKept:
      return parts_.totals->scored_by_weights;
    case ScoringKind::kAgain:
      return parts_.totals->scored_again;
    case ScoringKind::kNoRoom:
      break;
  }
  return parts_.totals->scored_without_room;
}

void Collector::CountStep(const StagedStep& step) {
  for (const LikeLayers& layers : like_layers_) {
    const auto group = static_cast<size_t>(
        parts_.arenas->layers()[static_cast<size_t>(layers.first)].page_group);
    const LayerAttention::SlotWork work = parts_.decoder->WorkOn(
        layers.first, step.batch->groups()[group].sequences,
        step.batch->rows());
    const auto count = static_cast<double>(layers.count);
    parts_.totals->reconstruction_flops +=
        count * (work.rebuild_flops + work.prompt_lift_flops);
    parts_.totals->prompt_lift_flops += count * work.prompt_lift_flops;
  }
  parts_.totals->static_codes += static_codes_per_token_ * step.sizes.tokens;
  for (size_t group = 0; group < scores_.size(); ++group) {
    if (!scores_[group]) continue;
    for (const kernels::AttentionSequence& sequence :
         step.batch->groups()[group].sequences) {
      ScoredTokens(ScoringOf(sequence)) +=
          std::max<int64_t>(0, sequence.num_rows - sequence.first_counted_row);
    }
  }
}

}  // namespace kvasir::worker
