// Collect: a step's results brought to the host and told in the plan's order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "kernels/sampling/sample.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {

using kvasir::v1::StepResult;

absl::StatusOr<StepResult> ModelExecutor::Collect() {
  if (staged_.sizes.tokens > 0) {
    KVASIR_RETURN_IF_ERROR(
        kernels::ReadBack(*parts_.stream, host_results_.data(), results(),
                          static_cast<size_t>(staged_.layout.bytes)));
    std::memcpy(&totals_.clamped_codes,
                host_results_.data() + staged_.layout.clamped_codes,
                sizeof(int64_t));
  } else {
    KVASIR_RETURN_IF_ERROR(parts_.stream->Synchronize());
  }
  CountStep(staged_.sizes.tokens);
  return ResultOf(staged_);
}

template <typename T>
T ModelExecutor::ResultAt(int64_t offset_bytes, int64_t index) const {
  T number;
  std::memcpy(&number,
              host_results_.data() + static_cast<size_t>(offset_bytes) +
                  static_cast<size_t>(index) * sizeof(T),
              sizeof(T));
  return number;
}

kvasir::v1::SequenceFault ModelExecutor::FaultOf(
    const StagedStep& step, const StepBatch::Output& output,
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

StepResult ModelExecutor::ResultOf(const StagedStep& step) const {
  StepResult out;
  out.set_step_id(step.step_id);
  int64_t first_row = 0;
  for (const StepBatch::Output& output : batch_.outputs()) {
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
        batch_.samples()[static_cast<size_t>(sample)].row.num_logprobs;
    for (int32_t i = 0; i < num_top; ++i) {
      const int64_t at = sample * step.bucket.padded.top + i;
      kvasir::v1::TopLogprob* const top = result->add_top();
      top->set_token_id(ResultAt<int32_t>(step.layout.top_ids, at));
      top->set_logprob(ResultAt<float>(step.layout.top_logprobs, at));
    }
  }
  return out;
}

int64_t& ModelExecutor::ScoredTokens(ScoringKind kind) {
  switch (kind) {
    case ScoringKind::kKept:
      return totals_.scored_by_weights;
    case ScoringKind::kAgain:
      return totals_.scored_again;
    case ScoringKind::kNoRoom:
      break;
  }
  return totals_.scored_without_room;
}

void ModelExecutor::CountStep(int64_t num_tokens) {
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
  totals_.static_codes += static_codes_per_token_ * num_tokens;
  for (size_t group = 0; group < scores_.size(); ++group) {
    if (!scores_[group]) continue;
    for (const kernels::AttentionSequence& sequence :
         batch_.groups()[group].sequences) {
      ScoredTokens(ScoringOf(sequence)) +=
          std::max<int64_t>(0, sequence.num_rows - sequence.first_counted_row);
    }
  }
}

}  // namespace kvasir::worker
