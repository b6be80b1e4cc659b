// What the planner of method auto has predicted of a plan, as
// `kvasir-compress` writes it beside the plan. From a file we do not trust.
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

// A plan of so many bytes of a token, fixed ones shared out included.
struct PlanPoint {
  double bytes_per_token = 0;  // above 0
  double kl = 0;               // divergence, nats a token, 0 or more
};

struct Prediction {
  std::string plan_sha256;  // of the plan's text; empty: it does not say
  PlanPoint plan;
  // Least and greatest over domains that are left out of the calibration.
  double kl_low = 0;
  double kl_high = 0;
  std::vector<PlanPoint> curve;   // predicted
  std::vector<PlanPoint> probes;  // measured

  bool IsOf(std::string_view plan_text) const;
};

// Fields of no interest here are not looked at. INVALID_ARGUMENT names file,
// field, what is wanted and what is there.
absl::StatusOr<Prediction> ParsePrediction(std::string_view json,
                                           const std::string& where);

nlohmann::ordered_json PredictionToJson(const Prediction& prediction);

}  // namespace kvasir::cli
