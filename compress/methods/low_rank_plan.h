// What the planners of low-rank methods share: which dims a latent may stand
// for, head groups, where a lift goes, and the last checks of a plan.
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

// Dims [first_dim, first_dim + num_dims) of every head of a layer's side: what
// one low_rank part covers.
struct Section {
  plan::Side side = plan::Side::kKey;
  int64_t first_dim = 0;
  int64_t num_dims = 0;
  bool rotates = false;  // has dims that RoPE turns
  // Covers the rotary dims alone and says so by their pairs.
  bool rotary_only = false;
};

enum class PartialRotary {
  // A part that rotates and is rebuilt, one that does not and is absorbed.
  kTwoParts,
  kOnePart,  // rebuilt as a whole
};
// Of the keys; values are one section of all dims.
std::vector<Section> KeySections(const model::DecoderSpec& spec, int64_t layer,
                                 PartialRotary partial);
Section ValueSection(const model::DecoderSpec& spec);

// Checks what every planner needs: keep in (0, 1], a rank multiple of 1 .. Hkv
// D, a model that can be dealt to tp ranks.
absl::Status CheckPlanRequest(const PlanRequest& request);

// Into how many runs the KV heads are dealt: a rank has one, more ranks than
// heads share them.
int64_t HeadShares(const PlanRequest& request);

// Runs of `group_heads` consecutive KV heads (0: all of a tensor-parallel
// rank); no group straddles two ranks. INVALID_ARGUMENT if it does not divide
// the heads of a rank.
using HeadGroup = std::vector<uint32_t>;
absl::StatusOr<std::vector<HeadGroup>> HeadGroups(const PlanRequest& request,
                                                  int64_t group_heads);

// Rows that a group has in a section's projection, and the most that its rank
// can be.
int64_t GroupRows(const HeadGroup& group, const Section& section);
int64_t MaxRank(const model::DecoderSpec& spec, const HeadGroup& group,
                const Section& section);

// A low_rank part over the section, `ranks[g]` for groups[g]. Rotated keys are
// stored PRE_ROPE and rebuilt. All else is absorbed: FOLD if it reads fewer
// weight bytes than AT_RUNTIME (FoldReadsLess).
kvasir::v1::Part LowRankPart(const model::DecoderSpec& spec,
                             const Section& section,
                             const std::vector<HeadGroup>& groups,
                             const std::vector<int64_t>& ranks,
                             const kvasir::v1::Codec& codec);

// Sum over query heads of R M against sum over groups of heads d R, + Hq d M:
// whether one matrix per query head is smaller than the lift beside the dense
// projection. R counts the channels that the part's codec stores, d is the dims
// of a head that are covered.
bool FoldReadsLess(const model::DecoderSpec& spec, const kvasir::v1::Part& part,
                   int64_t head_dims);

// Keys (after RoPE where the layer has one) or values as they are.
kvasir::v1::Part FullPart(const model::DecoderSpec& spec, int64_t layer,
                          plan::Side side, const kvasir::v1::Codec& codec);

// floor(keep * numbers) without falling below it by the rounding of a double.
int64_t KeptNumbers(double keep, int64_t numbers);

// The shortest text that reads back as the same number, for plans' options.
std::string NumberText(double number);

// FAILED_PRECONDITION without a calibration; `what` needs it.
absl::Status NeedCalibration(const PlanRequest& request,
                             const std::string& what);
// The same, and without Fisher information; `instead` does without.
absl::Status NeedFisher(const PlanRequest& request, const std::string& what,
                        const std::string& instead);
// FAILED_PRECONDITION where the request gives no weights.
absl::Status NeedWeights(const PlanRequest& request, const std::string& what);

// Fisher information of the rows of a projection, or of their roots: [Hkv * D]
// float64, contiguous. There is a calibration. INVALID_ARGUMENT, with layer and
// side, for one that is missing, of another size or no information.
absl::StatusOr<at::Tensor> FisherRows(const PlanRequest& request, int64_t layer,
                                      plan::Side side, bool root);

// Numbers that one token has in the keys and values of all layers, dense.
int64_t DenseNumbers(const model::DecoderSpec& spec);

// Fills in what every plan has, stores a side whose low-rank groups are all
// whole, in numbers and without a transform, as it is (a lift of full rank
// would cost the most and round), and judges the plan: plan::ValidatePlan, and
// the layout of every tensor-parallel rank. target.kv_bytes_per_token becomes
// the bytes that a token takes under the plan on all ranks together, without
// padding.
struct PlanIdentity {
  std::string method;
  std::string options;  // as a command line
  Decomposition decomposition = Decomposition::kWhitened;
};
absl::StatusOr<kvasir::v1::KvPlan> FinishPlan(const PlanRequest& request,
                                              const PlanIdentity& identity,
                                              kvasir::v1::KvPlan plan);

}  // namespace kvasir::compress
