#include "kernels/sampling/log_softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/sampling/ops.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<LogSoftmaxParams> kKernels = {
    "log_softmax", &LogSoftmaxReference, &LogSoftmaxSimd};

}  // namespace

void MergeLogitBlock(float block_max, float block_sum, LogSoftmaxState* state) {
  const float max = std::max(state->max, block_max);
  state->sum = std::fma(state->sum, Exp(state->max - max),
                        block_sum * Exp(block_max - max));
  state->max = max;
}

float LogProbability(float logit, const LogSoftmaxState& state) {
  return static_cast<float>((static_cast<double>(logit) - state.max) -
                            std::log(static_cast<double>(state.sum)));
}

void LogSoftmaxRows(const LogSoftmaxArgs& params, int64_t begin, int64_t end,
                    LogitBlockFunction add_block) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    LogSoftmaxState& state = params.state[t];
    if (params.vocab_begin == 0) state = {kLowest, 0.0f, kLowest};
    const float* row = params.logits + t * params.row_stride;
    for (int64_t i = 0; i < params.vocab_count; i += kVocabBlock) {
      add_block(row + i, std::min(kVocabBlock, params.vocab_count - i), &state);
    }
    const int64_t target = params.targets[t] - params.vocab_begin;
    if (target >= 0 && target < params.vocab_count) {
      state.target_logit = row[target];
    }
    if (params.last) {
      params.logprobs[t] = LogProbability(state.target_logit, state);
    }
  }
}

absl::Status CheckDeviceLogits(const char* op, DeviceKind device,
                               int64_t count) {
  if (device == DeviceKind::kCpu || count <= kMostDeviceLogits) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat(op, ": a GPU supports a vocabulary of at most ",
                   kMostDeviceLogits, " logits per row, not ", count));
}

absl::Status LogSoftmax(Stream& stream, const LogSoftmaxParams& params,
                        Workspace& workspace) {
  if (params.num_rows < 0) {
    return Refuse(kKernels.op, "rows", 0, params.num_rows);
  }
  if (params.vocab_count < 1) {
    return Refuse(kKernels.op, "vocab_count", 1, params.vocab_count);
  }
  if (params.vocab_begin < 0 || params.vocab_begin % kVocabBlock != 0 ||
      (!params.last && params.vocab_count % kVocabBlock != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "log_softmax: chunk [", params.vocab_begin, ", ",
        params.vocab_begin + params.vocab_count,
        "): its begin and, unless it is the last chunk, its end must be ",
        "multiples of ", kVocabBlock, " from 0 on"));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckDeviceLogits(kKernels.op, stream.device(), params.vocab_count));
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
