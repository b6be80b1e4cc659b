// Which tensors of a layer's attention are read into what, as its program says.
#pragma once

#include "absl/status/status.h"
#include "model/shapes/decoder_spec.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct AttentionLoad {
  const model::DecoderSpec* spec = nullptr;
  int64_t layer = 0;
  bool first_rank = true;  // adds the output's bias
};

// Allocates what `weights->attention` asks for and adds the jobs that fill it:
// every tensor of the program once, those that only other ranks use for the
// fingerprint. Errors of `jobs`.
absl::Status PlanAttention(const AttentionLoad& load, WeightJobs* jobs,
                           LayerWeights* weights);

}  // namespace kvasir::worker
