// Reads the output of `kvasir-compress evaluate --json`: the quality of
// compressed checkpoints and the bytes of their caches. All values are checked,
// because the file may come from elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// The uncompressed model, to which the rows are compared.
struct EvaluationTeacher {
  std::string model;
  double nats_per_token = 0;
  double nats_per_byte = 0;
  double kv_bytes_per_token = 0;
};

struct EvaluationRow {
  std::string model;
  std::string method;
  // the share of the uncompressed cache's numbers that the method keeps, from 0
  // to 1
  double keep = 0;
  double kv_bytes_per_token = 0;
  double kv_payload_bytes_per_token = 0;
  double fixed_bytes_per_sequence = 0;
  // The cache's bytes at the end of a window, divided by the window's tokens.
  // Evicted tokens take no bytes, and tokens that are stored exactly take more.
  double kv_bytes_per_seen_token = 0;
  std::string eviction;  // the eviction method; empty: all tokens stay
  double nats_per_token = 0;
  double nats_per_byte = 0;
  double perplexity = 0;  // infinite if the file has null
  double added_nats_per_token = 0;
  // The 95 % interval of added_nats_per_token.
  double added_low = 0;
  double added_high = 0;
  double top1_agreement = 0;
  double kl_nats = 0;  // infinite if the file has null
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

// Returns INVALID_ARGUMENT if `json` has another form. The error names the
// file and, for a wrong field, the row, the field and both values.
absl::StatusOr<Evaluation> ParseEvaluation(std::string_view json,
                                           const std::string& where);

}  // namespace kvasir::cli
