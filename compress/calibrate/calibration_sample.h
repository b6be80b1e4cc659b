// Which tokens of a calibration text are looked at.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/calibrate/token_stream.h"

namespace kvasir::compress {

struct SampleOptions {
  int64_t tokens = 16384;
  // Of one sequence; all are of this length.
  int64_t sequence_tokens = 1024;
  uint64_t seed = 42;
};

// Sequences of equal length.
struct CalibrationSample {
  int64_t sequence_tokens = 0;
  std::vector<std::vector<int32_t>> sequences;

  int64_t num_sequences() const {
    return static_cast<int64_t>(sequences.size());
  }
  int64_t num_tokens() const { return num_sequences() * sequence_tokens; }
};

// `tokens / sequence_tokens` different windows of the text, which lie on a grid
// with a random start. A larger sample under the same seed begins with the
// smaller one. InvalidArgument with what the text has and what is wanted, and
// for ids outside [0, vocab_size).
absl::StatusOr<CalibrationSample> SampleCalibration(
    const TokenStream& text, const SampleOptions& options, int64_t vocab_size);

}  // namespace kvasir::compress
