// The planner of method "auto": finds the plan with the least predicted loss
// for a number of bytes, or with the fewest bytes for a predicted loss. For
// each layer it considers every space (a way to store keys or values) that
// PlanSpeed allows, with groups of 1 to all KV heads. It measures the loss in
// each space for each bit width (layer_spaces.h) and distributes the bytes
// (allocation.h). It also tries different windows of exact tokens, which cost a
// fixed number of bytes per sequence.
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
  // At least one of kv_bytes_per_token and max_kl must be set. The bytes per
  // token include a share of the bytes that are fixed per sequence.
  std::optional<double> kv_bytes_per_token;
  std::optional<double> max_kl;  // predicted divergence, nats per token
  PlanSpeed speed = PlanSpeed::kCpu;
  // Sequence length for which bytes per token are computed. The fixed bytes of
  // a sequence are divided by this length. 0: 8192, or the model's context if
  // that is less.
  int64_t target_length = 0;
  // The window lengths (numbers of latest tokens that are kept exact) from
  // which the planner chooses.
  std::vector<int64_t> windows = {0, 8, 16, 32, 64, 128, 256};
  int64_t exact_sinks = 4;
  // Measured loss divided by predicted loss. Ignored if `probes` is not 0,
  // because probes measure it.
  double kappa = 1.0;
  // Number of plans to measure, at most kMostProbes; 0: none. Their budgets are
  // near that of the chosen plan, and they have no exact window.
  int probes = 0;
  // Measures the divergence of a plan in nats per token, for probes. Called by
  // one thread.
  std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)> measure;
  // PageFormat::granule_bytes of the pages for which bytes are counted: how
  // many bytes of a slot the device stores together.
  int64_t granule_bytes = 0;
  int threads = 1;
  // Called after each layer is measured, and again while the finished plan is
  // judged (JudgePlan), by one thread at a time. If it returns false, planning
  // ends with Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress;
};

// The spaces that were chosen for one layer.
struct LayerChoice {
  std::string spaces;  // such as "joint all" or "rope keys 1 + values 1"
  double bytes = 0;    // per token
  double loss = 0;     // predicted loss, including kappa and the window
};

struct CurvePoint {
  double bytes = 0;  // per token, including the share of fixed bytes
  double kl = 0;
};

struct DomainLoss {
  std::string name;
  double predicted = 0;  // loss on the domain's rows under the chosen plan
  // Loss on the domain's rows, with transforms and ranges found from the other
  // domains only.
  double left_out = 0;

  // Returns the factor by which the loss may be larger on text of a domain that
  // the calibration lacks.
  double ratio() const { return left_out / predicted; }
};
// Domains with a larger ratio than this are named in a warning.
inline constexpr double kDomainWarning = 1.5;

struct AutoPrediction {
  double kl = 0;
  // Bounds of kl, given how far kappa differs between the probes.
  double kl_low() const { return kl * kappa.low / kappa.median; }
  double kl_high() const { return kl * kappa.high / kappa.median; }
  // The least and the greatest of `kl` and the losses of all domains, with and
  // without the domain in the calibration (DomainLoss).
  double low = 0;
  double high = 0;
  FittedKappa kappa;          // from probes, or AutoOptions::kappa
  double bytes = 0;           // per token, including the share of fixed bytes
  double marginal_bytes = 0;  // for each additional token
  double fixed_bytes = 0;     // per sequence
  int64_t target_length = 0;
  int64_t exact_window = 0;
  // [9]; entry b is how many numbers per token have b bits.
  std::vector<double> channels_by_bits;
  // the loss on held-out rows, divided by that on the rows used for fitting
  double held_out_loss_ratio = 1;
  // share of the codes on held-out rows that were clamped
  double clamp_rate = 0;
  // attention time per cached token by the TimeModel; 0 without a model
  double slot_ns = 0;
  double dense_slot_ns = 0;
  std::vector<LayerChoice> layers;
  // The loss for different numbers of bytes at the chosen window, by rising
  // bytes.
  std::vector<CurvePoint> curve;
  // Domains with enough sample rows; empty if there is only one domain.
  std::vector<DomainLoss> domains;
};

struct AutoPlan {
  kvasir::v1::KvPlan plan;
  AutoPrediction prediction;
};

// Makes the plan. Reads only spec, calibration, weights and tp of the request.
// The calibration must include the Fisher information.
// Errors: INVALID_ARGUMENT if no plan meets the limits on bytes and loss (the
//   text states what can be reached); FAILED_PRECONDITION if the information or
//   the weights are missing; UNIMPLEMENTED for models that rotate only a part
//   of a head; CANCELLED if `progress` returns false; errors of `measure`.
absl::StatusOr<AutoPlan> PlanAuto(const PlanRequest& request,
                                  const AutoOptions& options);

}  // namespace kvasir::compress
