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
  kSvd,       // from the weights
  kWhitened,  // truncation-aware: from W L, with the input Gram = L LT
  kEspace,    // eigenvectors of the input Gram (Palu appendix K)
  kFisher,    // keys and values under their information (PlanAuto)
};
absl::StatusOr<Decomposition> ParseDecomposition(const std::string& name);
std::string DecompositionName(Decomposition decomposition);

// Returns the attention projections of a layer. Planners that need weights call
// it once per layer, from one thread at a time, and keep none.
using WeightSource =
    std::function<absl::StatusOr<AttentionWeights>(int64_t layer)>;

// The input of every planner. The calibration may be null for methods that need
// none (uniform ranks, LoRC). It outlives the call.
struct PlanRequest {
  model::DecoderSpec spec;
  const Calibration* calibration = nullptr;
  WeightSource weights;
  // Share of the numbers cached per token that is kept, over both sides, in (0,
  // 1].
  double keep = 0.5;
  // Every tensor-parallel rank gets whole groups and the same ranks. If there
  // are more tensor-parallel ranks than KV heads, they share heads, and groups
  // are single heads.
  int64_t tp = 1;
  // Ranks are multiples of this number and at least this number, except for
  // groups that are kept whole.
  int64_t rank_multiple = 8;
  // Codec of the latents of each side, set in every part.
  kvasir::v1::Codec key_codec;
  kvasir::v1::Codec value_codec;
};

// How the heads of a rope_low_rank group are weighed against each other: by the
// energy of their queries at the pair, but at least by a share of the layer's
// mean.
struct CommutingWeights {
  bool query_weights = true;
  double query_floor = 1e-3;  // finite, above 0
};
// The weights that the plan was made with, so that its factors use the same
// ones; the defaults if the plan does not say.
CommutingWeights CommutingWeightsOf(const kvasir::v1::KvPlan& plan);

// The input of every applier.
struct ApplyRequest {
  const model::DecoderSpec* spec = nullptr;
  const kvasir::v1::LayerPlan* plan = nullptr;
  int64_t layer = 0;
  AttentionWeights weights;
  // May be null if the decomposition needs none.
  const LayerCalibration* calibration = nullptr;
  int64_t num_tokens = 0;  // tokens in the calibration's sums
  Decomposition decomposition = Decomposition::kWhitened;
  // For low_rank parts: FactorRequest::split_singular_values.
  bool split_singular_values = false;
  CommutingWeights commuting;  // from CommutingWeightsOf(the plan)
  // Receives the cost of the factors; may be null.
  FactorProfile* profile = nullptr;
};

// All self_attn tensors of the layer except the ranges of CHANNEL_STATIC
// codecs, float32, under their artifact names (docs/artifact.md). The plan must
// have been validated against the spec.
// Errors: InvalidArgument for weights that are not finite or of another shape;
//   FailedPrecondition if the plan needs a calibration and there is none.
absl::StatusOr<TensorMap> ApplyLayerPlan(const ApplyRequest& request);

}  // namespace kvasir::compress
