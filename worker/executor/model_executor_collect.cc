// Collect: a step's results brought to the host and told in the plan's order.
#include <cstring>

#include "base/status_macros.h"
#include "kernels/device/read_back.h"
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
  }
  CountStep(staged_.sizes.tokens);
  return ResultOf(staged_);
}

StepResult ModelExecutor::ResultOf(const StagedStep& step) const {
  const auto read = [this]<typename T>(int64_t offset, size_t index, T) {
    T number;
    std::memcpy(
        &number,
        host_results_.data() + static_cast<size_t>(offset) + index * sizeof(T),
        sizeof(T));
    return number;
  };
  StepResult out;
  out.set_step_id(step.step_id);
  for (const StepBatch::Output& output : batch_.outputs()) {
    kvasir::v1::SequenceResult* const result = out.add_sequences();
    result->set_sequence_id(output.sequence_id);
    result->set_token_id(-1);
    for (int64_t i = 0; i < output.num_targets; ++i) {
      result->add_target_logprobs(
          read(step.layout.target_logprobs,
               static_cast<size_t>(output.first_target + i), float{}));
    }
    if (output.sample < 0) continue;
    const auto sample = static_cast<size_t>(output.sample);
    result->set_token_id(read(step.layout.token_ids, sample, int32_t{}));
    result->set_logprob(read(step.layout.logprobs, sample, float{}));
    const int32_t num_top = batch_.samples()[sample].row.num_logprobs;
    for (int32_t i = 0; i < num_top; ++i) {
      const size_t at = sample * static_cast<size_t>(step.bucket.padded.top) +
                        static_cast<size_t>(i);
      kvasir::v1::TopLogprob* const top = result->add_top();
      top->set_token_id(read(step.layout.top_ids, at, int32_t{}));
      top->set_logprob(read(step.layout.top_logprobs, at, float{}));
    }
  }
  return out;
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
}

}  // namespace kvasir::worker
