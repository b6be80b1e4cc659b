// Computes the results of a step from its hidden states: sampled tokens, and
// log probabilities of given tokens. The head runs only for rows whose results
// the plan asks for.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/sampling/sample.h"
#include "worker/executor/decoder.h"

namespace kvasir::worker {

// The rows to sample. All pointers are device memory.
struct SampleBatch {
  int64_t num_rows = 0;
  int64_t padded_rows = 0;                            // num_rows after padding
  kernels::DevicePtr<const int32_t> token_rows;       // [num_rows]
  kernels::DevicePtr<const kernels::SampleRow> rows;  // [num_rows]
  int64_t max_top = 0;
  kernels::DevicePtr<int32_t> token_ids;   // [num_rows], out
  kernels::DevicePtr<float> logprobs;      // [num_rows], out
  kernels::DevicePtr<int32_t> top_ids;     // [num_rows, max_top], out
  kernels::DevicePtr<float> top_logprobs;  // [num_rows, max_top], out
};

struct TargetBatch {
  int64_t num_rows = 0;
  int64_t padded_rows = 0;
  kernels::DevicePtr<const int32_t> token_rows;  // [num_rows]
  kernels::DevicePtr<const int32_t> target_ids;  // [num_rows]
  kernels::DevicePtr<float> logprobs;            // [num_rows], out
};

// Runs head and sampler. `decoder` must outlive it.
//
// Threads: one at a time.
class StepOutput {
 public:
  // The buffer for logits has at most `logits_bytes`, but always room for one
  // sample, and for one block of the vocabulary (kVocabBlock) for each of
  // `max_rows` targets. If samples need more, they are computed in chunks of
  // rows, each of which reads the head's weights again. Targets are computed in
  // chunks of the vocabulary, which together read the head's weights once.
  StepOutput(const Decoder* decoder, int64_t max_rows, int64_t logits_bytes);

  absl::Status Sample(kernels::Stream& stream, const HiddenStates& hidden,
                      const SampleBatch& batch,
                      kernels::Workspace& workspace) const;

  absl::Status ScoreTargets(kernels::Stream& stream, const HiddenStates& hidden,
                            const TargetBatch& batch,
                            kernels::Workspace& workspace) const;

  // Reads back the logits of all rows [0, num_rows), in chunks of rows, and
  // passes them to `reader`. For tests and debugging. `token_rows` contains 0,
  // 1, 2, ... on the device.
  using RowsReader = absl::FunctionRef<absl::Status(
      int64_t first_row, absl::Span<const float> logits)>;
  absl::Status ReadAllLogits(kernels::Stream& stream,
                             const HiddenStates& hidden,
                             kernels::DevicePtr<const int32_t> token_rows,
                             int64_t num_rows, RowsReader reader,
                             kernels::Workspace& workspace) const;

  // The size of a chunk of samples: the most rows that are sampled at a time.
  int64_t logits_rows() const;

 private:
  const Decoder* const decoder_;
  // The size of the logits buffer. It is the same for all steps, so that a
  // small step never needs more memory than the largest step.
  int64_t logits_floats_ = 0;
};

}  // namespace kvasir::worker
