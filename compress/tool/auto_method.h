// The flags of `--method auto`, and the prediction that it prints before a plan
// is written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/planner/auto_plan.h"
#include "compress/tool/calibration.h"
#include "model/checkpoint/checkpoint.h"
#include "nlohmann/json_fwd.hpp"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

inline constexpr char kAutoMethod[] = "auto";

struct AutoFlags {
  std::optional<double> max_kl;
  std::string speed = "cpu";
  int64_t target_length = 0;
  // If empty, AutoOptions::windows keeps its default.
  std::vector<int64_t> windows;
  std::optional<double> kappa;  // if not set: measured by probes, or 1
  std::optional<int> probes;    // not set: kDefaultProbes with --max-kl, else 0
};
void AddAutoFlags(CLI::App* command, AutoFlags& flags);

// Throws CLI::ValidationError for flags that contradict one another.
void CheckAutoFlags(const AutoFlags& flags);

// Makes the plan. Probes are measured on the held-out sequences of the sample.
// Only the number of threads and `quiet` of `machine` are read.
absl::StatusOr<compress::AutoPlan> MakeAutoPlan(
    const AutoFlags& flags, std::optional<uint32_t> exact_sinks,
    std::optional<double> kv_bytes_per_token, int64_t tp,
    const CalibrationFlags& machine, const model::Checkpoint& checkpoint,
    const CalibrationInputs& inputs);

// Returns the text that is printed: predicted loss, bits, bytes, warnings about
// domains, and the curve of loss over bytes.
std::string PredictionText(const compress::AutoPrediction& prediction);
nlohmann::ordered_json PredictionJson(
    const compress::AutoPrediction& prediction);

}  // namespace kvasir::cli
