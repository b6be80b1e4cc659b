// The prediction of method auto for a plan, which kvasir-compress writes beside
// the plan. The file is not trusted.
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

// "X.json" has its prediction in "X.json.prediction.json".
std::string PredictionPathOfPlan(const std::string& plan);

// A plan on the curve. Its bytes per token include a share of the bytes per
// sequence.
struct PlanPoint {
  double bytes_per_token = 0;  // above 0
  double kl = 0;               // divergence in nats per token, 0 or more
};

struct Prediction {
  std::string plan_sha256;  // the hash of the plan's text; empty: unknown
  PlanPoint plan;
  // The least and the greatest value over domains, each left out of the
  // calibration in turn.
  double kl_low = 0;
  double kl_high = 0;
  std::vector<PlanPoint> curve;   // predicted
  std::vector<PlanPoint> probes;  // measured

  bool IsOf(std::string_view plan_text) const;
};

// Ignores fields that are not needed here. INVALID_ARGUMENT names the file, the
// field, and the wanted and the found value.
absl::StatusOr<Prediction> ParsePrediction(std::string_view json,
                                           const std::string& where);

nlohmann::ordered_json PredictionToJson(const Prediction& prediction);

}  // namespace kvasir::cli
