#include "worker/executor/step_output.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "kernels/sampling/ops.h"

namespace kvasir::worker {
namespace {

using kernels::Stream;
using kernels::Workspace;

}  // namespace

StepOutput::StepOutput(const Decoder* decoder, int64_t max_rows,
                       int64_t logits_bytes)
    : decoder_(decoder) {
  const int64_t vocab = decoder->spec().vocab_size;
  const int64_t wanted = std::min(
      logits_bytes / static_cast<int64_t>(sizeof(float)), max_rows * vocab);
  const int64_t least =
      std::max(vocab, max_rows * std::min(vocab, kernels::kVocabBlock));
  logits_floats_ = std::max(wanted, least);
}

int64_t StepOutput::logits_rows() const {
  return logits_floats_ / decoder_->spec().vocab_size;
}

absl::Status StepOutput::Sample(Stream& stream, const HiddenStates& hidden,
                                const SampleBatch& batch,
                                Workspace& workspace) const {
  const int64_t vocab = decoder_->spec().vocab_size;
  const int64_t m = decoder_->spec().hidden_size;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> logits =
      workspace.Take<float>(logits_floats_);
  const int64_t chunk = std::min(logits_rows(), batch.padded_rows);
  const kernels::DevicePtr<float> normed =
      decoder_->activations().Take(workspace, chunk * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  for (int64_t row = 0; row < batch.num_rows; row += chunk) {
    const int64_t count = std::min(chunk, batch.num_rows - row);
    KVASIR_RETURN_IF_ERROR(decoder_->FinalNorm(
        stream, hidden, batch.token_rows + row, count, normed, workspace));
    KVASIR_RETURN_IF_ERROR(
        decoder_->Logits(stream, normed, count, {0, vocab}, logits, workspace));
    kernels::SampleParams params;
    params.logits = logits;
    params.row_stride = vocab;
    params.num_rows = count;
    params.vocab = vocab;
    params.rows = batch.rows + row;
    params.token_ids = batch.token_ids + row;
    params.logprobs = batch.logprobs + row;
    params.max_top = batch.max_top;
    params.top_ids = batch.top_ids + row * batch.max_top;
    params.top_logprobs = batch.top_logprobs + row * batch.max_top;
    const StepPartScope part_of_step(decoder_->profile(), stream,
                                     StepPart::kSampling);
    KVASIR_RETURN_IF_ERROR(kernels::Sample(stream, params, workspace));
  }
  return absl::OkStatus();
}

absl::Status StepOutput::ScoreTargets(Stream& stream,
                                      const HiddenStates& hidden,
                                      const TargetBatch& batch,
                                      Workspace& workspace) const {
  if (batch.num_rows == 0) return absl::OkStatus();
  const int64_t vocab = decoder_->spec().vocab_size;
  const int64_t m = decoder_->spec().hidden_size;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> logits =
      workspace.Take<float>(logits_floats_);
  const kernels::DevicePtr<float> normed =
      decoder_->activations().Take(workspace, batch.padded_rows * m);
  const auto state =
      workspace.Take<kernels::LogSoftmaxState>(batch.padded_rows);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(decoder_->FinalNorm(
      stream, hidden, batch.token_rows, batch.num_rows, normed, workspace));
  int64_t chunk = logits_floats_ / batch.padded_rows;
  chunk = chunk >= vocab ? vocab
                         : chunk / kernels::kVocabBlock * kernels::kVocabBlock;
  for (int64_t begin = 0; begin < vocab; begin += chunk) {
    const int64_t count = std::min(chunk, vocab - begin);
    KVASIR_RETURN_IF_ERROR(decoder_->Logits(stream, normed, batch.num_rows,
                                            {begin, count}, logits, workspace));
    kernels::LogSoftmaxParams params;
    params.logits = logits;
    params.row_stride = count;
    params.num_rows = batch.num_rows;
    params.vocab_begin = begin;
    params.vocab_count = count;
    params.last = begin + count == vocab;
    params.targets = batch.target_ids;
    params.state = state;
    params.logprobs = batch.logprobs;
    KVASIR_RETURN_IF_ERROR(kernels::LogSoftmax(stream, params, workspace));
  }
  return absl::OkStatus();
}

absl::Status StepOutput::ReadAllLogits(
    Stream& stream, const HiddenStates& hidden,
    kernels::DevicePtr<const int32_t> token_rows, int64_t num_rows,
    RowsReader reader, Workspace& workspace) const {
  const int64_t vocab = decoder_->spec().vocab_size;
  const int64_t m = decoder_->spec().hidden_size;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> logits =
      workspace.Take<float>(logits_floats_);
  const int64_t chunk = std::min(logits_rows(), num_rows);
  const kernels::DevicePtr<float> normed =
      decoder_->activations().Take(workspace, chunk * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  std::vector<float> host;
  for (int64_t row = 0; row < num_rows; row += chunk) {
    const int64_t count = std::min(chunk, num_rows - row);
    KVASIR_RETURN_IF_ERROR(decoder_->FinalNorm(stream, hidden, token_rows + row,
                                               count, normed, workspace));
    KVASIR_RETURN_IF_ERROR(
        decoder_->Logits(stream, normed, count, {0, vocab}, logits, workspace));
    if (workspace.counting()) continue;
    host.resize(static_cast<size_t>(count * vocab));
    KVASIR_RETURN_IF_ERROR(kernels::ReadBack(stream, host.data(), logits,
                                             host.size() * sizeof(float)));
    KVASIR_RETURN_IF_ERROR(reader(row, host));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
