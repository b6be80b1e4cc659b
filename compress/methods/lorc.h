// LoRC: keys and values of a layer as one low-rank latent each, of a rank that
// falls with depth as the layers' condition numbers say. Needs weights only.
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
  // Largest over smallest singular value (ConditionNumber, which says what
  // counts where the smallest is 0).
  double key_condition = 1;
  double value_condition = 1;
  // Logarithm of the product over this layer and all after it, both sides.
  double cumulative_log = 0;
};
// Per layer, in order. Reads the weights once.
absl::StatusOr<std::vector<LayerSensitivity>> MeasureSensitivity(
    const PlanRequest& request, double log_base, FactorProfile* profile);

struct LorcOptions {
  // Ranks by equation 13; false: the control, which compresses the same layers
  // to one rank (but for the multiple that rounding leaves over).
  bool progressive = true;
  // Base of the logarithm that `threshold` is compared with. Ranks do not
  // depend on it.
  double log_base = 10;
  // Layers whose cumulative_log is above it stay as they are.
  std::optional<double> threshold;
  // Instead: the threshold that leaves out this many layers, the most
  // sensitive.
  int64_t skip_layers = 0;
  // Instead: compresses these layers only, to one rank, and `keep` counts
  // inside them (what a single layer or a block of layers is worth).
  std::vector<int64_t> only_layers;
  // d_min of equation 13, a layer's rank at the least sensitivity; the
  // request's keep is then not read. Absent: the greatest that meets keep.
  std::optional<int64_t> min_rank;
  // May be null.
  FactorProfile* profile = nullptr;
};

// Plan with the same rank for a layer's keys and values, plain SVD, one group
// of all KV heads (of a tensor-parallel rank; then with its part of the rank).
// Layers that are left out are stored as they are, in the request's codecs.
//   d_l = d_max (1 - (max log k - log k_l) / (max log k - min log k)
//                    (1 - d_min / d_max)), d_max = Hkv D,
// over all layers, also the ones left out; equal logarithms everywhere: d_min.
// Errors: INVALID_ARGUMENT for a keep that the left-out layers alone exceed,
// for a threshold that is not finite or leaves out every layer,
// for more than one of threshold, skip_layers, only_layers, and for weights
// that are not finite; FAILED_PRECONDITION without weights.
absl::StatusOr<kvasir::v1::KvPlan> PlanLorc(const PlanRequest& request,
                                            const LorcOptions& options);

}  // namespace kvasir::compress
