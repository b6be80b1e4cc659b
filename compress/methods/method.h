// A compression method is a planner, which decides ranks and codecs, and
// appliers, which turn a layer's projections into the tensors of
// docs/artifact.md. Appliers go by what the plan says and not by the method's
// name: a plan edited by hand applies as well.
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

// How low-rank factors are found. Do not rename: plans carry the names.
enum class Decomposition {
  kSvd,       // of the weights
  kWhitened,  // truncation-aware: of W L, with the input Gram = L LT
  kEspace,    // eigenvectors of the input Gram (Palu appendix K)
  kFisher,    // of keys and values under their information (the planner's)
};
absl::StatusOr<Decomposition> ParseDecomposition(const std::string& name);
std::string DecompositionName(Decomposition decomposition);

// Gives the attention projections of a layer; planners that look at weights
// call it once per layer, one thread at a time, and keep none.
using WeightSource =
    std::function<absl::StatusOr<AttentionWeights>(int64_t layer)>;

// What every planner gets. The calibration may be null for methods that need
// none (uniform ranks, LoRC); it outlives the call.
struct PlanRequest {
  model::DecoderSpec spec;
  const Calibration* calibration = nullptr;
  WeightSource weights;
  // Kept share of the numbers cached per token, over both sides (0, 1].
  double keep = 0.5;
  // Every tensor-parallel rank gets whole groups and the same ranks. More than
  // there are KV heads share each head, so that groups are single heads.
  int64_t tp = 1;
  // Ranks are multiples of it (and at least it), but for whole groups.
  int64_t rank_multiple = 8;
  // Codec of the latents of each side, put into every part.
  kvasir::v1::Codec key_codec;
  kvasir::v1::Codec value_codec;
};

// How the heads of a rope_low_rank group are weighed against each other: by the
// energy of their queries at the pair, floored at a share of the layer's mean.
struct CommutingWeights {
  bool query_weights = true;
  double query_floor = 1e-3;  // finite, above 0
};
// What the plan was made with, so that its factors are weighed alike; the
// defaults if it does not say.
CommutingWeights CommutingWeightsOf(const kvasir::v1::KvPlan& plan);

// What every applier gets.
struct ApplyRequest {
  const model::DecoderSpec* spec = nullptr;
  const kvasir::v1::LayerPlan* plan = nullptr;
  int64_t layer = 0;
  AttentionWeights weights;
  // Null where the decomposition needs none.
  const LayerCalibration* calibration = nullptr;
  int64_t num_tokens = 0;  // behind the calibration's sums
  Decomposition decomposition = Decomposition::kWhitened;
  // Of low_rank parts: FactorRequest::split_singular_values.
  bool split_singular_values = false;
  CommutingWeights commuting;  // CommutingWeightsOf the plan
  // Counts what factors cost; may be null.
  FactorProfile* profile = nullptr;
};

// All self_attn tensors of the layer but the ranges of CHANNEL_STATIC codecs,
// float32, under their artifact names (docs/artifact.md). The plan was
// validated against the spec.
// Errors: InvalidArgument for weights that are not finite or of another shape;
//   FailedPrecondition where the plan needs a calibration and there is none.
absl::StatusOr<TensorMap> ApplyLayerPlan(const ApplyRequest& request);

}  // namespace kvasir::compress
