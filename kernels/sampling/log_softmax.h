// log_softmax: computes the log probability of one target id per row. The
// vocabulary comes in chunks, so that the logits of a long text are never all
// in memory. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

// The running result of a row, which the caller keeps between chunks.
struct LogSoftmaxState {
  float max;
  float sum;           // sum of exp(logit - max)
  float target_logit;  // set by the chunk that has the target
};

// The chunks of a vocabulary must be passed in order. Each chunk except the
// last must have a multiple of this number of ids. Then the bits of the result
// do not depend on the sizes of the chunks.
inline constexpr int64_t kVocabBlock = 1024;

// The most logits in a row on a GPU. It is limited, because a CTA keeps the
// maximum and sum of every block of the row in shared memory.
inline constexpr int64_t kMostDeviceLogits = 1 << 20;

// Adds the logits of ids [vocab_begin, vocab_begin + vocab_count) to the state.
// The chunk with vocab_begin 0 initialises the state. If `last` is set, writes
// logprobs[t] = logit(target) - max - log(sum). A target outside [0, vocab) has
// log probability -infinity. If any logit of a row is infinite or NaN, the
// row's log probability is not finite either, whatever the target.
template <template <typename> class Ptr>
struct LogSoftmaxParamsIn {
  Ptr<const float> logits = nullptr;  // [T, vocab_count]
  int64_t row_stride = 0;             // in elements
  int64_t num_rows = 0;               // T
  int64_t vocab_begin = 0;
  int64_t vocab_count = 0;
  bool last = true;
  Ptr<const int32_t> targets = nullptr;  // [T]
  Ptr<LogSoftmaxState> state = nullptr;  // [T]
  Ptr<float> logprobs = nullptr;         // [T], written only if `last` is set

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(logits, targets, state, logprobs);
  }
};
using LogSoftmaxParams = LogSoftmaxParamsIn<DevicePtr>;
using LogSoftmaxArgs = LogSoftmaxParamsIn<LaunchPtr>;

// AddLogitBlock adds a block of at most kVocabBlock logits to the state. It
// computes 16 lanes of maxima, then 16 lanes of sums of exp(logit - max), and
// merges both into the state. It also adds 0 times each logit, so that a logit
// that is not finite makes the sum NaN.
using LogitBlockFunction = void (*)(const float* logits, int64_t count,
                                    LogSoftmaxState* state);
void AddLogitBlock(const float* logits, int64_t count, LogSoftmaxState* state);
void AddLogitBlockSimd(const float* logits, int64_t count,
                       LogSoftmaxState* state);
void MergeLogitBlock(float block_max, float block_sum, LogSoftmaxState* state);
float LogProbability(float logit, const LogSoftmaxState& state);
void LogSoftmaxRows(const LogSoftmaxArgs& params, int64_t begin, int64_t end,
                    LogitBlockFunction add_block);

class CpuStream;
void LogSoftmaxReference(const LogSoftmaxArgs& params, CpuStream& stream);
void LogSoftmaxSimd(const LogSoftmaxArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
