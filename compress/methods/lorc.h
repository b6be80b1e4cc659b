// LoRC: a layer stores its keys as one low-rank latent and its values as
// another. A layer's rank depends on the condition numbers of the projections
// in this and all later layers. Needs only the weights.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/low_rank.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How much a layer's key and value projections amplify a disturbance.
struct LayerSensitivity {
  // The largest singular value divided by the smallest one. ConditionNumber
  // defines the result if the smallest one is 0.
  double key_condition = 1;
  double value_condition = 1;
  // Logarithm of the product of all condition numbers (of keys and values) in
  // this layer and all later layers.
  double cumulative_log = 0;
};
// Returns the sensitivity of each layer, in order. Reads the weights once.
absl::StatusOr<std::vector<LayerSensitivity>> MeasureSensitivity(
    const PlanRequest& request, double log_base, FactorProfile* profile);

struct LorcOptions {
  // If true, more sensitive layers get larger ranks, by the formula at
  // PlanLorc. If false, all compressed layers get the same rank, up to one
  // rounding step.
  bool progressive = true;
  // The base of the logarithm in cumulative_log. It matters only for
  // `threshold`; ranks do not depend on it.
  double log_base = 10;
  // Layers whose cumulative_log is above this threshold are not compressed.
  std::optional<double> threshold;
  // Alternative to `threshold`: this many of the most sensitive layers are not
  // compressed.
  int64_t skip_layers = 0;
  // Alternative to `threshold`: only these layers are compressed, all to the
  // same rank, and the request's `keep` is the kept share of these layers. This
  // shows how sensitive a single layer or a block of layers is.
  std::vector<int64_t> only_layers;
  // The rank of the least sensitive layer: d_min in the formula at PlanLorc. If
  // set, the request's `keep` is ignored. If not set, d_min is as large as
  // `keep` allows.
  std::optional<int64_t> min_rank;
  // Receives the cost of the decompositions; may be null.
  FactorProfile* profile = nullptr;
};

// Makes a plan. Keys and values of a layer get the same rank, by plain SVD, in
// one group of all KV heads. With tensor parallelism, the heads of each
// parallel rank form a group, which gets an equal part of the layer's rank.
// Layers that the options exclude are stored whole, in the request's codecs.
//
// By equation 13 of the paper, the rank of layer l is
//   d_l = d_max (1 - (max log k - log k_l) / (max log k - min log k)
//                    (1 - d_min / d_max)).
// Here d_max = Hkv D, and log k_l is the layer's cumulative_log. max and min
// are over all layers, including excluded layers. If all logarithms are equal,
// the rank is d_min.
//
// Errors: INVALID_ARGUMENT if the excluded layers already take more than
//   `keep`, for a threshold that is not finite or excludes every layer, for
//   more than one of threshold, skip_layers and only_layers, and for weights
//   that are not finite; FAILED_PRECONDITION without weights.
absl::StatusOr<kvasir::v1::KvPlan> PlanLorc(const PlanRequest& request,
                                            const LorcOptions& options);

}  // namespace kvasir::compress
