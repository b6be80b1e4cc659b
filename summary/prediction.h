// Reads a prediction of a plan's loss. kvasir-compress (method auto) writes it
// into a file next to the plan. The content is checked, because the file may
// come from elsewhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace kvasir::cli {

inline constexpr int64_t kMaxPredictionBytes = int64_t{4} << 20;

// Returns the path of a plan's prediction: "X.json.prediction.json"
// for "X.json".
std::string PredictionPathOfPlan(const std::string& plan);

// The size and the loss of one plan. bytes_per_token includes the bytes that a
// plan needs once per sequence, divided by the sequence's tokens.
struct PlanPoint {
  double bytes_per_token = 0;  // above 0
  // KL divergence from the uncompressed model in nats per token, 0 or more
  double kl = 0;
};

struct Prediction {
  std::string plan_sha256;  // the hash of the plan's text; empty: unknown
  PlanPoint plan;
  // The lowest and the highest of several predictions of the KL divergence.
  // Each was made without one domain (kind of text) of the calibration text.
  double kl_low = 0;
  double kl_high = 0;
  std::vector<PlanPoint> curve;   // predictions for other plans
  std::vector<PlanPoint> probes;  // plans whose divergence was measured

  bool IsOf(std::string_view plan_text) const;
};

// Parses a prediction and ignores fields that are not needed here.
// INVALID_ARGUMENT names the file, the field, and the allowed and the
// found value.
absl::StatusOr<Prediction> ParsePrediction(std::string_view json,
                                           const std::string& where);

nlohmann::ordered_json PredictionToJson(const Prediction& prediction);

}  // namespace kvasir::cli
