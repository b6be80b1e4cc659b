// Code that the planners of low-rank methods share: the dims that a latent may
// stand for, head groups, the place of a lift, and the final checks of a plan.
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

// The dims [first_dim, first_dim + num_dims) of every head of a layer's side:
// what one low_rank part covers.
struct Section {
  plan::Side side = plan::Side::kKey;
  int64_t first_dim = 0;
  int64_t num_dims = 0;
  bool rotates = false;  // contains dims that RoPE rotates
  // Covers exactly the rotary dims; the plan names them by their pairs.
  bool rotary_only = false;
};

enum class PartialRotary {
  // One part that rotates and is rebuilt, and one that does not rotate and is
  // absorbed.
  kTwoParts,
  kOnePart,  // rebuilt as a whole
};
// Sections of the keys. Values are one section of all dims.
std::vector<Section> KeySections(const model::DecoderSpec& spec, int64_t layer,
                                 PartialRotary partial);
Section ValueSection(const model::DecoderSpec& spec);

// Checks what every planner needs: keep in (0, 1], a rank multiple in 1 .. Hkv
// D, and a model that can be split over tp ranks.
absl::Status CheckPlanRequest(const PlanRequest& request);

// Number of runs that the KV heads are split into: one per rank, or one per
// head if there are more ranks than heads.
int64_t HeadShares(const PlanRequest& request);

// Runs of `group_heads` consecutive KV heads (0: all heads of a tensor-parallel
// rank). No group spans two ranks. INVALID_ARGUMENT if `group_heads` does not
// divide the heads of a rank.
using HeadGroup = std::vector<uint32_t>;
absl::StatusOr<std::vector<HeadGroup>> HeadGroups(const PlanRequest& request,
                                                  int64_t group_heads);

// The rows that a group has in a section's projection, and the largest rank
// that it can have.
int64_t GroupRows(const HeadGroup& group, const Section& section);
int64_t MaxRank(const model::DecoderSpec& spec, const HeadGroup& group,
                const Section& section);

// A low_rank part over the section with rank `ranks[g]` for groups[g]. Keys
// that rotate are stored PRE_ROPE and rebuilt. Everything else is absorbed: by
// FOLD if that reads fewer weight bytes than AT_RUNTIME (FoldReadsLess).
kvasir::v1::Part LowRankPart(const model::DecoderSpec& spec,
                             const Section& section,
                             const std::vector<HeadGroup>& groups,
                             const std::vector<int64_t>& ranks,
                             const kvasir::v1::Codec& codec);

// Compares the sum over query heads of R M with the sum over groups of heads d
// R, + Hq d M: returns whether one matrix per query head is smaller than the
// lift beside the dense projection. R counts the channels that the part's codec
// stores; d is the number of covered dims of a head.
bool FoldReadsLess(const model::DecoderSpec& spec, const kvasir::v1::Part& part,
                   int64_t head_dims);

// Keys (after RoPE if the layer has it) or values, stored as they are.
kvasir::v1::Part FullPart(const model::DecoderSpec& spec, int64_t layer,
                          plan::Side side, const kvasir::v1::Codec& codec);

// floor(keep * numbers), corrected for the rounding of a double.
int64_t KeptNumbers(double keep, int64_t numbers);

// The shortest text that reads back as the same number. Used in plans' options.
std::string NumberText(double number);

// FAILED_PRECONDITION, saying that `what` needs it, if there is no calibration.
absl::Status NeedCalibration(const PlanRequest& request,
                             const std::string& what);
// As NeedCalibration, and also if the calibration has no Fisher information;
// `instead` names an option that needs none.
absl::Status NeedFisher(const PlanRequest& request, const std::string& what,
                        const std::string& instead);
// FAILED_PRECONDITION if the request has no weights.
absl::Status NeedWeights(const PlanRequest& request, const std::string& what);

// Fisher information of the rows of a projection (`root`: of their roots), [Hkv
// * D] float64, contiguous. The request must have a calibration.
// INVALID_ARGUMENT, with layer and side, if the information is missing, of
// another size, negative, not finite or all zero.
absl::StatusOr<at::Tensor> FisherRows(const PlanRequest& request, int64_t layer,
                                      plan::Side side, bool root);

// Numbers that a token has in the uncompressed keys and values of all layers.
int64_t DenseNumbers(const model::DecoderSpec& spec);

// Completes and checks a plan. Fills in what every plan has. A side whose
// low-rank groups all have full rank, in numbers and without a transform, is
// stored as it is, because its lift would cost the most and only round. The
// plan must pass plan::ValidatePlan, and the layout of every tensor-parallel
// rank must exist. target.kv_bytes_per_token becomes the bytes of a token under
// the plan, on all ranks together, without padding.
struct PlanIdentity {
  std::string method;
  std::string options;  // as a command line
  Decomposition decomposition = Decomposition::kWhitened;
};
absl::StatusOr<kvasir::v1::KvPlan> FinishPlan(const PlanRequest& request,
                                              const PlanIdentity& identity,
                                              kvasir::v1::KvPlan plan);

}  // namespace kvasir::compress
