// Applies full parts, which store whole keys or values, or their coordinates in
// a principal basis.
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/apply/apply_part.h"
#include "compress/methods/low_rank.h"
#include "compress/methods/rope_factors.h"

namespace kvasir::compress {
namespace {

// Returns the moments of the keys or values as they are stored; for POST_ROPE
// these are keys after their rotation.
absl::StatusOr<ProjectedMoments> StoredMoments(const PartInput& input) {
  KVASIR_RETURN_IF_ERROR(NeedCalibration(input, "BASIS_STATIC"));
  const LayerCalibration& calibration = *input.request->calibration;
  if (input.part->stored() == kvasir::v1::POST_ROPE) {
    if (!calibration.rotated_key_gram.defined()) {
      return absl::FailedPreconditionError(
          absl::StrCat(input.Place(),
                       "a basis of keys that are stored after their rotation "
                       "(POST_ROPE) needs the Gram matrix of rotated keys, "
                       "but the calibration was made without it"));
    }
    return ProjectedMoments{calibration.rotated_key_gram,
                            calibration.rotated_key_sum};
  }
  return MomentsOfProjection(input.weight(), input.bias(), calibration,
                             input.request->num_tokens);
}

absl::Status AddBasis(const PartInput& input, AppliedPart& applied) {
  KVASIR_ASSIGN_OR_RETURN(const ProjectedMoments moments, StoredMoments(input));
  const std::vector<int64_t> stored =
      StoredIndices(input.part->codec(), moments.gram.size(0));
  const absl::StatusOr<PrincipalBasis> basis =
      FindPrincipalBasis({.gram = moments.gram,
                          .sum = moments.sum,
                          .num_tokens = input.request->num_tokens,
                          .rank = stored.back() + 1,
                          .centred = input.part->mean()});
  if (!basis.ok()) return ErrorOf(input, basis.status());
  applied.tensors["basis.weight"] =
      basis->rows.index_select(0, at::tensor(stored, at::kLong)).to(at::kFloat);
  if (basis->mean.defined()) {
    applied.tensors["basis.mean"] = basis->mean.to(at::kFloat);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AppliedPart> ApplyFull(const PartInput& input) {
  AppliedPart applied;
  applied.tensors["weight"] = input.weight();
  if (input.bias().defined()) applied.tensors["bias"] = input.bias();
  if (input.part->codec().has_basis_static()) {
    KVASIR_RETURN_IF_ERROR(AddBasis(input, applied));
  }
  const int64_t dim = input.spec().head_dim;
  for (int64_t head = 0; head < input.spec().num_kv_heads; ++head) {
    applied.head_maps.push_back(at::eye(dim, at::kDouble));
  }
  return applied;
}

}  // namespace kvasir::compress
