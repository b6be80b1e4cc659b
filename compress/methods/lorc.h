// LoRC: stores the keys and the values of a layer as one low-rank latent each.
// The rank falls with depth, according to the layers' condition numbers. Needs
// only weights.
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
  // Largest over smallest singular value. ConditionNumber says what happens if
  // the smallest one is 0.
  double key_condition = 1;
  double value_condition = 1;
  // Logarithm of the product over this layer and all later ones, both sides.
  double cumulative_log = 0;
};
// Per layer, in order. Reads the weights once.
absl::StatusOr<std::vector<LayerSensitivity>> MeasureSensitivity(
    const PlanRequest& request, double log_base, FactorProfile* profile);

struct LorcOptions {
  // True: ranks by equation 13. False: the control, which gives all compressed
  // layers the same rank (apart from what rounding to the multiple leaves
  // over).
  bool progressive = true;
  // Base of the logarithm that `threshold` is compared with. Ranks do not
  // depend on it.
  double log_base = 10;
  // Layers with a larger cumulative_log stay as they are.
  std::optional<double> threshold;
  // Alternative to `threshold`: leave out this many of the most sensitive
  // layers.
  int64_t skip_layers = 0;
  // Alternative: compress only these layers, to one rank; `keep` then holds for
  // them. This measures what a single layer or a block of layers is worth.
  std::vector<int64_t> only_layers;
  // d_min of equation 13, the rank of a layer of least sensitivity; the
  // request's `keep` is then not read. Absent: the greatest d_min that meets
  // `keep`.
  std::optional<int64_t> min_rank;
  // May be null.
  FactorProfile* profile = nullptr;
};

// The same rank for a layer's keys and values, by plain SVD, in one group of
// all KV heads. With tensor parallelism the heads of each rank form a group,
// which gets its part of the rank. Layers that are left out are stored as they
// are, in the request's codecs.
//   d_l = d_max (1 - (max log k - log k_l) / (max log k - min log k) (1 - d_min
//   / d_max))
// Here d_max = Hkv D, and max and min are over all layers, including those that
// are left out. If all logarithms are equal, the rank is d_min.
// Errors: INVALID_ARGUMENT for a `keep` that the left-out layers already
//   exceed, for a threshold that is not finite or leaves out every layer, for
//   more than one of threshold, skip_layers and only_layers, and for weights
//   that are not finite; FAILED_PRECONDITION without weights.
absl::StatusOr<kvasir::v1::KvPlan> PlanLorc(const PlanRequest& request,
                                            const LorcOptions& options);

}  // namespace kvasir::compress
