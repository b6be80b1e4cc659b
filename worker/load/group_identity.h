// The identity of the model that a rank is about to load. All ranks of a group
// compare theirs.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "proto/kvasir/v1/rank.pb.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {

struct RunSizes {
  int64_t page_tokens = 0;
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;
  bool deterministic = false;
  bool graphs = false;
};

// All ranks of a group make equal identities, without the fields of the group
// itself. A null `device` is the CPU. Errors: those of reading config.json.
absl::StatusOr<kvasir::v1::RankIdentity> IdentityOf(
    const ModelSource& source, uint64_t weights_seed,
    const kernels::Device* device, const RunSizes& sizes);

}  // namespace kvasir::cli
