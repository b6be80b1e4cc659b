// What one part of a plan adds to a layer. Internal to ApplyLayerPlan; a file
// per space. Functions throw c10::Error; apply.cc catches it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/low_rank.h"
#include "compress/methods/method.h"
#include "compress/planner/layer_moments.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/plan_tensors.h"
#include "plan/plan.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

struct PartInput {
  const ApplyRequest* request = nullptr;
  plan::Side side = plan::Side::kKey;  // of a joint part the key
  const kvasir::v1::Part* part = nullptr;
  const plan::ResolvedPart* shape = nullptr;  // what it must come to
  InputMoments* moments = nullptr;            // null without a calibration
  const LayerMoments* fisher = nullptr;       // null but for kFisher

  const model::DecoderSpec& spec() const { return *request->spec; }
  // The side's projection; the bias is undefined where there is none.
  const at::Tensor& weight() const { return weight(side); }
  const at::Tensor& bias() const { return bias(side); }
  const at::Tensor& weight(plan::Side of) const;
  const at::Tensor& bias(plan::Side of) const;
  // "layer 3 key part 0: ".
  std::string Place() const;
};

struct AppliedPart {
  // Under their names after "k_proj." or "k_proj.part{p}.".
  TensorMap tensors;
  // Per KV head [D, n], float64: what the query's rows, or the output's
  // columns, are multiplied by if anything on the side folds. The lift, or for
  // a part that does not fold the choice of the dims that it covers.
  std::vector<at::Tensor> head_maps;
  // Values: what is left of bias and mean after the lift, [Hkv * D] float64;
  // undefined: nothing.
  at::Tensor constant;
};

absl::StatusOr<AppliedPart> ApplyFull(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyLowRank(const PartInput& input);
// A part of key and value, each with its own lifts; the key has what both
// share. `value` is what the values' must come to.
struct AppliedJointPart {
  AppliedPart key;
  AppliedPart value;
};
absl::StatusOr<AppliedJointPart> ApplyJointLowRank(
    const PartInput& input, const plan::ResolvedPart& value);
absl::StatusOr<AppliedPart> ApplyRopePairs(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyRopeLowRank(const PartInput& input);

// [D, n] float64: column c picks dims[c] of a head.
at::Tensor ChoiceOfDims(int64_t head_dim, const std::vector<int64_t>& dims);

// Rows of `heads` at `dims` of each, of a [Hkv * D, ...] tensor.
at::Tensor RowsOfHeads(const at::Tensor& matrix, int64_t head_dim,
                       const std::vector<int64_t>& heads,
                       const std::vector<int64_t>& dims);

// Channels of a latent that the tensors hold: those whose bits are not 0, or
// all where a basis is still to be found in them (BASIS_SEQUENCE).
std::vector<int64_t> StoredIndices(const kvasir::v1::Codec& codec,
                                   int64_t width);

// The error with the part's place before its text.
absl::Status ErrorOf(const PartInput& input, const absl::Status& error);

// FAILED_PRECONDITION with the part's place when there is no calibration.
absl::Status NeedCalibration(const PartInput& input, const std::string& what);
}  // namespace kvasir::compress
