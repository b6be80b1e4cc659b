// A compression method consists of a planner, which decides ranks and codecs,
// and appliers, which turn a layer's projections into the tensors of
// docs/artifact.md. Appliers read only the plan and not the method's name, so a
// plan that was edited by hand can be applied as well.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/calibrate/calibration.h"
#include "compress/tensors/attention_weights.h"
#include "compress/tensors/tensor_map.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct FactorProfile;  // compress/methods/low_rank.h

// How low-rank factors are found. Plans contain these names: do not rename
// them.
enum class Decomposition {
  kSvd,       // from the weights only
  kWhitened,  // from W L, where L LT is the Gram matrix of the inputs
  kEspace,    // eigenvectors of the input Gram matrix (Palu, appendix K)
  kFisher,    // by the Fisher information of keys and values (PlanAuto)
};
absl::StatusOr<Decomposition> ParseDecomposition(const std::string& name);
std::string DecompositionName(Decomposition decomposition);

// Returns the attention projections of a layer. Planners that need weights call
// it once per layer, by one thread at a time, and do not keep the weights.
using WeightSource =
    std::function<absl::StatusOr<AttentionWeights>(int64_t layer)>;

// The input of every planner. The calibration must outlive the call; it may be
// null for methods that do not need it (uniform ranks, LoRC).
struct PlanRequest {
  model::DecoderSpec spec;
  const Calibration* calibration = nullptr;
  WeightSource weights;
  // The share of a token's cached numbers that the plan keeps, counting keys
  // and values together, in (0, 1].
  double keep = 0.5;
  // Number of tensor-parallel ranks. All get the same number of whole head
  // groups, with latents of the same widths. If there are more tensor-parallel
  // ranks than KV heads, several of them share a head, and each group is a
  // single head.
  int64_t tp = 1;
  // The rank of a latent is a positive multiple of this number. Groups that are
  // kept whole may have any rank.
  int64_t rank_multiple = 8;
  // The codecs of the key latents and value latents in every part of the plan.
  kvasir::v1::Codec key_codec;
  kvasir::v1::Codec value_codec;
};

// How heads are weighted when a rope_low_rank part is made. Without
// query_weights, all weights are 1. With it, a head's weight at a RoPE pair
// comes from its queries' energy there, at least query_floor times the mean.
struct CommutingWeights {
  bool query_weights = true;
  double query_floor = 1e-3;  // finite, above 0
};
// Returns the weights that the plan was made with, so that its factors use the
// same weights; returns the defaults if the plan does not record them.
CommutingWeights CommutingWeightsOf(const kvasir::v1::KvPlan& plan);

// The input of every applier.
struct ApplyRequest {
  const model::DecoderSpec* spec = nullptr;
  const kvasir::v1::LayerPlan* plan = nullptr;
  int64_t layer = 0;
  AttentionWeights weights;
  // May be null if the decomposition needs no calibration.
  const LayerCalibration* calibration = nullptr;
  int64_t num_tokens = 0;  // number of tokens in the calibration's sums
  Decomposition decomposition = Decomposition::kWhitened;
  // For low_rank parts: the value of FactorRequest::split_singular_values.
  bool split_singular_values = false;
  CommutingWeights commuting;  // the result of CommutingWeightsOf(plan)
  // Receives the cost of the factors; may be null.
  FactorProfile* profile = nullptr;
};

// Returns all self_attn tensors of the layer except the ranges of
// CHANNEL_STATIC codecs, in float32, by their names in the artifact
// (docs/artifact.md). The plan must have been validated against the spec.
// Errors: InvalidArgument for weights that are not finite or of another shape;
//   FailedPrecondition if the plan needs a calibration and there is none.
absl::StatusOr<TensorMap> ApplyLayerPlan(const ApplyRequest& request);

}  // namespace kvasir::compress
