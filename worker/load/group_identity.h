// Describes what a rank is about to load (RankIdentity), so that the ranks of a
// group can check that they load the same.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "proto/kvasir/v1/rank.pb.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {

struct RunSettings {
  int64_t page_tokens = 0;
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;
  bool deterministic = false;
  bool graphs = false;
  std::string plan_check;
  std::string key_means;
};

// Returns the identity of a rank, which must be equal on all ranks of a group.
// The fields about the group itself are not set. A null `device` means the CPU.
// Errors: those of reading config.json.
absl::StatusOr<kvasir::v1::RankIdentity> IdentityOf(
    const ModelSource& source, uint64_t weights_seed,
    const kernels::Device* device, const RunSettings& settings);

}  // namespace kvasir::cli
