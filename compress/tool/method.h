// The flags that choose a compression method, how much it keeps, and how
// latents are coded.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/tool/auto_method.h"
#include "compress/tool/calibration.h"
#include "model/checkpoint/checkpoint.h"
#include "plan/eviction_flags.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct MethodFlags {
  std::string method;
  std::optional<double> keep;
  std::optional<double> kv_bytes_per_token;
  std::optional<double> key_keep;
  std::string key_bits = "auto";
  std::string value_bits = "auto";
  std::string group_heads = "auto";
  std::string hadamard = "auto";
  std::string decomposition = "whitened";
  std::string search;  // if empty, the method's default
  std::string fisher_score = "mean-root";
  std::optional<int64_t> rank_multiple;  // if not set, the method's default
  int64_t tp = 1;
  // The next options are for LoRC.
  std::string ranks = "progressive";
  double log_base = 10.0;
  std::optional<double> threshold;
  int64_t skip_layers = 0;
  // For all methods: only these layers are compressed; empty: all layers.
  std::vector<int64_t> only_layers;
  // For all methods with codes: the number of latest (window) and first (sinks)
  // tokens of a sequence that are kept exact.
  uint32_t exact_window = 0;
  std::optional<uint32_t> exact_sinks;  // if not set: 0, or 4 for method auto
  // The next options are for RAP and commuting.
  std::string pair_score = "fisher";
  std::string query_weights = "on";
  double query_floor = 1e-3;
  bool keep_values = false;
  // The next options are for SVDq and channel codes.
  bool post_rope = false;
  double average_bits = 4.0;
  AutoFlags automatic;
  // For all methods: the eviction that is added to the plan, if any. The method
  // q-hitter does nothing else.
  EvictionFlags eviction;
  // For method q-hitter: path of the plan to which eviction is added; if empty,
  // eviction is added to a plan of whole keys and values.
  std::string evict_from;
};

// The name of the method that only adds eviction, to a given plan or to whole
// keys and values.
inline constexpr char kEvictionMethod[] = "q-hitter";

// Adds the flags to `command`. If `required` is true, the user must give a
// method; otherwise a plan's file may be given instead.
void AddMethodFlags(CLI::App* command, MethodFlags& flags, bool required);

// Throws CLI::ValidationError (wrong usage) for flags that contradict each
// other.
void CheckMethodFlags(const MethodFlags& flags);

// Adds the eviction that the flags ask for, if any, to a plan of the model.
// Errors: those of plan::ValidatePlan.
absl::Status AddEviction(const MethodFlags& flags,
                         const model::Checkpoint& checkpoint,
                         kvasir::v1::KvPlan& plan);

// The parts of a calibration that the method's planner reads.
CalibrationNeeds NeedsOfPlanner(const MethodFlags& flags);

// Makes the plan and its provenance, except for what RecordCalibration writes.
// `bytes_of` returns a plan's bytes per token, for --kv-bytes-per-token.
absl::StatusOr<kvasir::v1::KvPlan> MakePlan(
    const MethodFlags& flags, const model::Checkpoint& checkpoint,
    const compress::Calibration* calibration,
    const std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)>&
        bytes_of);

}  // namespace kvasir::cli
