// Plans the reading of a layer's attention tensors, as the layer's program
// says.
#pragma once

#include "absl/status/status.h"
#include "model/shapes/decoder_spec.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct AttentionLoad {
  const model::DecoderSpec* spec = nullptr;
  int64_t layer = 0;
  bool first_rank = true;  // only this rank adds the output's bias
};

// Allocates what `weights->attention` needs and adds the jobs that fill it.
// Every tensor of the program is read once; tensors that only other ranks use
// are read for the fingerprint. Returns the errors of `jobs`.
absl::Status PlanAttention(const AttentionLoad& load, WeightJobs* jobs,
                           LayerWeights* weights);

}  // namespace kvasir::worker
