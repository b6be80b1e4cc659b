// Makes the tensors that one part of a plan adds to a layer. Only
// ApplyLayerPlan uses these functions. Each kind of part (such as low_rank) has
// its own .cc file. The functions throw c10::Error, which apply.cc catches.
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
  // the resolved part, which gives the shapes of the result
  const plan::ResolvedPart* shape = nullptr;
  InputMoments* moments = nullptr;  // null if there is no calibration
  // Null unless the decomposition is kFisher.
  const LayerMoments* fisher = nullptr;

  const model::DecoderSpec& spec() const { return *request->spec; }
  // The projection that makes this side's keys or values. The bias is undefined
  // if the model has none.
  const at::Tensor& weight() const { return weight(side); }
  const at::Tensor& bias() const { return bias(side); }
  const at::Tensor& weight(plan::Side side_wanted) const;
  const at::Tensor& bias(plan::Side side_wanted) const;
  // Returns a prefix for error texts that names this part, such as "layer 3 key
  // part 0: ".
  std::string Place() const;
};

struct AppliedPart {
  // The tensors by their names without their prefix, such as "k_proj." or
  // "k_proj.part{p}.".
  TensorMap tensors;
  // One float64 matrix [D, n] for each KV head. If any part of the side folds,
  // the query projection's rows (for keys) or the output projection's columns
  // (for values) are multiplied by it. It is the part's lift if the lift is
  // folded into the weights. Otherwise it selects the dims that the part
  // covers.
  std::vector<at::Tensor> head_maps;
  // For values: the constant (bias and mean) to be added after the lift, [Hkv *
  // D] float64. Undefined if there is none.
  at::Tensor constant;
};

absl::StatusOr<AppliedPart> ApplyFull(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyLowRank(const PartInput& input);
// The tensors of a joint part, which has one latent for keys and values. `key`
// also holds the tensors that both sides share.
struct AppliedJointPart {
  AppliedPart key;
  AppliedPart value;
};
// Applies a joint low_rank part. `value` is the resolved part of the values,
// which gives the shapes of their tensors.
absl::StatusOr<AppliedJointPart> ApplyJointLowRank(
    const PartInput& input, const plan::ResolvedPart& value);
absl::StatusOr<AppliedPart> ApplyRopePairs(const PartInput& input);
absl::StatusOr<AppliedPart> ApplyRopeLowRank(const PartInput& input);

// Returns a selection matrix [D, n], float64: column c selects dims[c] of a
// head.
at::Tensor ChoiceOfDims(int64_t head_dim, const std::vector<int64_t>& dims);

// Returns the rows of `matrix` [Hkv * D, ...] that belong to these dims of
// these heads.
at::Tensor RowsOfHeads(const at::Tensor& matrix, int64_t head_dim,
                       const std::vector<int64_t>& heads,
                       const std::vector<int64_t>& dims);

// Indices of the latent's channels that are stored in the tensors: the
// channels with more than 0 bits. If the basis is found for each sequence
// (BASIS_SEQUENCE), all channels are stored.
std::vector<int64_t> StoredIndices(const kvasir::v1::Codec& codec,
                                   int64_t width);

// Returns `error` with Place() as a prefix of its text.
absl::Status ErrorOf(const PartInput& input, const absl::Status& error);

// Returns FAILED_PRECONDITION if the request has no calibration. The text
// begins with Place() and says that `what` needs one.
absl::Status NeedCalibration(const PartInput& input, const std::string& what);
}  // namespace kvasir::compress
