// What a model that is loaded as one rank of a group needs of the group.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/rank.pb.h"
#include "worker/collective/collective.h"
#include "worker/ranks/group/rank_group_state.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

// Ranks of one host share its cores and memory, and each takes a GPU.
struct LocalShare {
  int index = 0;
  int count = 1;
};

// What a rank tells before it reads a weight.
struct GroupTerms {
  // But for what is the group's own: its size, collective and timeouts.
  kvasir::v1::RankIdentity identity;
  // worker::RankGroupOptions'.
  std::function<absl::StatusOr<worker::CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // worker::NcclOptions', while the rank's device lives; null: it is the CPU.
  std::function<absl::Status()> use_device;
};

// Threads: one.
// Errors: what the group ended of.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual plan::TpShard shard() const = 0;
  virtual LocalShare local() const = 0;
  // Until all ranks have come, and are connected. The collective lives as long
  // as this.
  virtual absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) = 0;
  // Until all ranks have loaded.
  virtual absl::StatusOr<worker::RankAgreement> Agree(
      const worker::RankOffer& offer) = 0;
};

}  // namespace kvasir::cli
