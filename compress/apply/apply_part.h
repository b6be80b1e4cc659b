// The tensors that one part of a plan adds to a layer. Internal to
// ApplyLayerPlan; each space has a file of its own. Functions throw c10::Error,
// which apply.cc catches.
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
  plan::Side side = plan::Side::kKey;  // kKey for a joint part
  const kvasir::v1::Part* part = nullptr;
  const plan::ResolvedPart* shape = nullptr;  // the shape that the result must
                                              // have
  InputMoments* moments = nullptr;            // null without a calibration
  const LayerMoments* fisher = nullptr;  // null unless the decomposition is
                                         // kFisher

  const model::DecoderSpec& spec() const { return *request->spec; }
  // The side's projection. The bias is undefined if the model has none.
  const at::Tensor& weight() const { return weight(side); }
  const at::Tensor& bias() const { return bias(side); }
  const at::Tensor& weight(plan::Side side_wanted) const;
  const at::Tensor& bias(plan::Side side_wanted) const;
  // The part's place for error texts, such as "layer 3 key part 0: ".
  std::string Place() const;
};

struct AppliedPart {
  // Names after "k_proj." or "k_proj.part{p}.".
  TensorMap tensors;
  // Per KV head [D, n], float64. If anything on the side folds, the query's
  // rows or the output's columns are multiplied by these matrices. It is the
  // lift, or, for a part that does not fold, the selection of the dims that the
  // part covers.
  std::vector<at::Tensor> head_maps;
  // For values: bias and mean that remain after the lift, [Hkv * D] float64.
  // Undefined if nothing remains.
  at::Tensor constant;
};

absl::StatusOr<AppliedPart> ApplyFull(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyLowRank(const PartInput& input);
// A part of key and value with a lift for each. The key holds the tensors that
// both share. `value` is the shape that the value's tensors must have.
struct AppliedJointPart {
  AppliedPart key;
  AppliedPart value;
};
absl::StatusOr<AppliedJointPart> ApplyJointLowRank(
    const PartInput& input, const plan::ResolvedPart& value);
absl::StatusOr<AppliedPart> ApplyRopePairs(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyRopeLowRank(const PartInput& input);

// [D, n] float64: column c selects dims[c] of a head.
at::Tensor ChoiceOfDims(int64_t head_dim, const std::vector<int64_t>& dims);

// The rows of `heads` at `dims` of each head, from a [Hkv * D, ...] tensor.
at::Tensor RowsOfHeads(const at::Tensor& matrix, int64_t head_dim,
                       const std::vector<int64_t>& heads,
                       const std::vector<int64_t>& dims);

// The channels of a latent that the tensors hold: those with bits. If a basis
// is found per sequence (BASIS_SEQUENCE), the tensors hold all channels.
std::vector<int64_t> StoredIndices(const kvasir::v1::Codec& codec,
                                   int64_t width);

// `error` with the part's place in front of its text.
absl::Status ErrorOf(const PartInput& input, const absl::Status& error);

// FAILED_PRECONDITION with the part's place if there is no calibration.
absl::Status NeedCalibration(const PartInput& input, const std::string& what);
}  // namespace kvasir::compress
