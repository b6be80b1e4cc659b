// Code that the planners of low-rank methods share: which dims a latent covers,
// groups of heads, where a lift is applied, and the final checks of a plan.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "model/shapes/decoder_spec.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// One low_rank part covers the dims [first_dim, first_dim + num_dims) of every
// head of a layer's keys or values.
struct Section {
  plan::Side side = plan::Side::kKey;
  int64_t first_dim = 0;
  int64_t num_dims = 0;
  bool rotates = false;  // true if RoPE rotates some of its dims
  // True if the section covers exactly the dims that rotate; the plan then
  // names them by their RoPE pairs.
  bool rotary_only = false;
};

enum class PartialRotary {
  // Two parts. The dims that rotate are rebuilt from latents. For all other
  // dims, attention works on the latents themselves (FOLD or AT_RUNTIME).
  kTwoParts,
  kOnePart,  // one part, which is rebuilt as a whole
};
// Returns the sections of a layer's keys.
std::vector<Section> KeySections(const model::DecoderSpec& spec, int64_t layer,
                                 PartialRotary partial);
// Returns the section of a layer's values, which covers all dims.
Section ValueSection(const model::DecoderSpec& spec);

// Checks what every planner needs: `keep` in (0, 1], a rank multiple from 1 to
// the number of key dims in a layer, and a model that can be split over `tp`
// ranks.
absl::Status CheckPlanRequest(const PlanRequest& request);

// Returns the number of equal shares into which tensor parallelism divides the
// KV heads. There is one share per rank, or one per head if there are more
// ranks than heads.
int64_t HeadShares(const PlanRequest& request);

// The indices of the KV heads that share a latent.
using HeadGroup = std::vector<uint32_t>;
// Divides the KV heads into groups of `group_heads` consecutive heads (0: all
// heads of a tensor-parallel rank). No group spans two ranks. INVALID_ARGUMENT
// if `group_heads` does not divide the number of a rank's heads.
absl::StatusOr<std::vector<HeadGroup>> HeadGroups(const PlanRequest& request,
                                                  int64_t group_heads);

// Returns the number of rows of the projection that belong to the group's heads
// and the section's dims.
int64_t GroupRows(const HeadGroup& group, const Section& section);
// Returns the largest rank that the group's latent can have in the section.
int64_t MaxRank(const model::DecoderSpec& spec, const HeadGroup& group,
                const Section& section);

// Makes a low_rank part over the section in which groups[g] has the rank
// ranks[g]. Keys that rotate are stored PRE_ROPE and rebuilt. All other keys,
// and values, are not rebuilt: their lift is absorbed by FOLD or by AT_RUNTIME,
// whichever reads fewer weights (FoldReadsLess).
kvasir::v1::Part LowRankPart(const model::DecoderSpec& spec,
                             const Section& section,
                             const std::vector<HeadGroup>& groups,
                             const std::vector<int64_t>& ranks,
                             const kvasir::v1::Codec& codec);

// Returns whether FOLD reads fewer weights than AT_RUNTIME. FOLD reads a matrix
// [R, M] for each query head. AT_RUNTIME reads the lift, heads * d * R numbers
// for each group, and the dense projection, Hq * d * M numbers. R is the number
// of channels that the part's codec stores. The part covers d (`head_dims`)
// dims of each head.
bool FoldReadsLess(const model::DecoderSpec& spec, const kvasir::v1::Part& part,
                   int64_t head_dims);

// Makes a part that stores whole keys (after RoPE, if the layer has RoPE) or
// whole values.
kvasir::v1::Part FullPart(const model::DecoderSpec& spec, int64_t layer,
                          plan::Side side, const kvasir::v1::Codec& codec);

// Returns floor(keep * numbers), corrected for the rounding error of the
// product.
int64_t KeptNumbers(double keep, int64_t numbers);

// Returns the shortest text that is parsed to the same number, for
// PlanIdentity::options.
std::string NumberText(double number);

// Returns FAILED_PRECONDITION, saying that `what` needs a calibration, if the
// request has none.
absl::Status NeedCalibration(const PlanRequest& request,
                             const std::string& what);
// Like NeedCalibration, but also fails if the calibration has no Fisher
// information; `instead` names an option that needs no such information.
absl::Status NeedFisher(const PlanRequest& request, const std::string& what,
                        const std::string& instead);
// Returns FAILED_PRECONDITION, saying that `what` needs weights, if the request
// has none.
absl::Status NeedWeights(const PlanRequest& request, const std::string& what);

// Returns the Fisher information of each row of a projection, [Hkv * D]
// float64, contiguous. With `root`, the scores are key_fisher_root and
// value_fisher_root of LayerCalibration. The request must have a calibration.
// INVALID_ARGUMENT, with layer and side, if the scores are missing, have
// another size, or are negative or not finite.
absl::StatusOr<at::Tensor> FisherRows(const PlanRequest& request, int64_t layer,
                                      plan::Side side, bool root);

// Returns how many numbers the uncompressed keys and values of a token have, in
// all layers together.
int64_t DenseNumbers(const model::DecoderSpec& spec);

// The method and its settings, for the plan's provenance.
struct PlanIdentity {
  std::string method;
  std::string options;  // in the form of command line flags
  Decomposition decomposition = Decomposition::kWhitened;
};
// Completes and checks a plan. Fills in the fields that every plan has. If all
// low-rank groups of a layer's keys (or values) have full rank, without codes
// or a transform, whole keys (or values) are stored instead. A lift would then
// only cost time and add rounding errors. The plan must pass
// plan::ValidatePlan, and every tensor-parallel rank must have a page layout.
// Sets target.kv_bytes_per_token to the bytes that a token takes on all ranks
// together, without padding.
absl::StatusOr<kvasir::v1::KvPlan> FinishPlan(const PlanRequest& request,
                                              const PlanIdentity& identity,
                                              kvasir::v1::KvPlan plan);

}  // namespace kvasir::compress
