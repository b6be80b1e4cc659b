// The planner: the plan of least predicted loss for a number of bytes, or of
// fewest bytes for a predicted loss. Method "auto".
//
// Per layer it looks at every space that the speed allows, in groups of 1 ..
// all KV heads, measures what codes of each width lose there (layer_spaces.h)
// and shares out the bytes that pages count (allocation.h). Windows of exact
// tokens are tried as fixed bytes of a sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "compress/planner/kappa.h"
#include "compress/planner/plan_speed.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

inline constexpr int kMostProbes = 32;

struct AutoOptions {
  // At least one of them.
  std::optional<double> kv_bytes_per_token;  // fixed ones shared out included
  std::optional<double> max_kl;              // nats a token
  PlanSpeed speed = PlanSpeed::kCpu;
  // Tokens that what a sequence has beside its tokens is shared out to; 0:
  // 8192, or what the model takes.
  int64_t target_length = 0;
  // Of exact tokens, to choose from.
  std::vector<int64_t> windows = {0, 8, 16, 32, 64, 128, 256};
  int64_t exact_sinks = 4;
  // Measured over predicted; with probes it is fitted.
  double kappa = 1.0;
  // So many plans of budgets about the chosen one, without its window, are
  // measured, at most kMostProbes; 0: none.
  int probes = 0;
  // Divergence of a plan, nats a token; called by one thread.
  std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)> measure;
  int64_t granule_bytes = 0;  // of the device's pages
  int threads = 1;
  // After every layer that is measured or judged, by one thread at a time;
  // returning false ends with Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress;
};

// Each layer's choice.
struct LayerChoice {
  std::string spaces;  // "joint all", "rope keys 1 + values 1"
  double bytes = 0;    // of a token
  double loss = 0;     // predicted, kappa and window included
};

struct CurvePoint {
  double bytes = 0;  // of a token, fixed ones shared out included
  double kl = 0;
};

struct DomainLoss {
  std::string name;
  double predicted = 0;  // on its rows, by the plan of all domains
  // By transforms and ranges of the other domains.
  double left_out = 0;

  // What a domain like none of the text's may cost.
  double ratio() const { return left_out / predicted; }
};
// Above it a domain is named in a warning.
inline constexpr double kDomainWarning = 1.5;

struct AutoPrediction {
  double kl = 0;
  // By the spread of the probes' kappa.
  double kl_low() const { return kl * kappa.low / kappa.median; }
  double kl_high() const { return kl * kappa.high / kappa.median; }
  // Least and greatest over domains that are left out of the calibration.
  double low = 0;
  double high = 0;
  FittedKappa kappa;          // without trials: as given
  double bytes = 0;           // of a token, fixed ones shared out included
  double marginal_bytes = 0;  // of one more token
  double fixed_bytes = 0;     // of a sequence
  int64_t target_length = 0;
  int64_t exact_window = 0;
  std::vector<double> channels_by_bits;  // [9], numbers of a token
  double held_out_loss_ratio = 1;        // on held-out rows, over fitted rows
  double clamp_rate = 0;                 // of codes, on held-out rows
  double slot_ns = 0;  // by the model of time; 0: not modelled
  double dense_slot_ns = 0;
  std::vector<LayerChoice> layers;
  std::vector<CurvePoint> curve;    // at the chosen window, rising bytes
  std::vector<DomainLoss> domains;  // that have rows enough; none if alone
};

struct AutoPlan {
  kvasir::v1::KvPlan plan;
  AutoPrediction prediction;
};

// Uses spec, calibration (with information), weights and tp of the request.
// Errors: INVALID_ARGUMENT for bytes below what is possible or a loss that they
// do not reach, with what is possible; FAILED_PRECONDITION without a
// calibration's information; UNIMPLEMENTED for models that turn a part of a
// head; CANCELLED; what measure says.
absl::StatusOr<AutoPlan> PlanAuto(const PlanRequest& request,
                                  const AutoOptions& options);

}  // namespace kvasir::compress
