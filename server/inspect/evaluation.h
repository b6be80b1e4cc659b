// What `kvasir-compress evaluate --json` writes: the quality of compressed
// checkpoints against the bytes of their caches. From a file we do not trust.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// The uncompressed model that all rows are compared with.
struct EvaluationTeacher {
  std::string model;
  double nats_per_token = 0;
  double nats_per_byte = 0;
  double kv_bytes_per_token = 0;
};

struct EvaluationRow {
  std::string model;
  std::string method;
  double keep = 0;  // share of the numbers that is kept, 0 .. 1
  double kv_bytes_per_token = 0;
  double kv_payload_bytes_per_token = 0;
  double fixed_bytes_per_sequence = 0;
  // What is held of a window that was read, over its tokens: what makes rows
  // comparable that give tokens up, or keep some exact.
  double kv_bytes_per_seen_token = 0;
  std::string eviction;  // its method; empty: all tokens stay
  double nats_per_token = 0;
  double nats_per_byte = 0;
  double perplexity = 0;  // infinite where the file has null
  double added_nats_per_token = 0;
  // 95 % interval of added_nats_per_token.
  double added_low = 0;
  double added_high = 0;
  double top1_agreement = 0;
  double kl_nats = 0;  // likewise
  double repeat_nats_per_token = 0;
};

struct Evaluation {
  EvaluationTeacher teacher;
  std::string text;
  int64_t window_tokens = 0;
  int64_t windows = 0;
  std::vector<EvaluationRow> rows;
};

inline constexpr int64_t kMaxEvaluationBytes = int64_t{16} << 20;

// INVALID_ARGUMENT names file, row, field, what is wanted and what is there.
absl::StatusOr<Evaluation> ParseEvaluation(std::string_view json,
                                           const std::string& where);

}  // namespace kvasir::cli
