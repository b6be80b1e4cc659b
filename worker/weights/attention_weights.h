// Plans how the attention tensors of a layer are loaded, as the layer's
// attention program says.
#pragma once

#include "absl/status/status.h"
#include "model/shapes/decoder_spec.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct AttentionLoad {
  const model::DecoderSpec* spec = nullptr;
  int64_t layer = 0;
  // Whether this is rank 0, which adds the output's bias.
  bool first_rank = true;
};

// Allocates the memory that the program `weights->attention` needs, and adds
// jobs that fill it. Each tensor of the program is read once; tensors that only
// other ranks use are read only for the fingerprint of the weights. Returns the
// errors of `jobs`.
absl::Status PlanAttention(const AttentionLoad& load, WeightJobs* jobs,
                           LayerWeights* weights);

}  // namespace kvasir::worker
