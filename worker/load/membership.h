// A rank's membership in a group of ranks that load and run a model together.
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

// This rank's place among the ranks of its host. These ranks share the host's
// cores and memory, and each has a GPU of its own.
struct LocalShare {
  int index = 0;
  int count = 1;
};

// The data that a rank hands over to join its group, before it reads weights.
struct GroupTerms {
  // The fields about the group (its size, collective and timeouts) are not set.
  kvasir::v1::RankIdentity identity;
  // See RankGroupOptions::combine.
  std::function<absl::StatusOr<worker::CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // Selects the rank's GPU for the calling thread; null for the CPU. May be
  // called as long as the rank's device exists.
  std::function<absl::Status()> use_device;
};

// A rank's membership in its group.
//
// Threads: one thread calls all methods. Errors: after the group has ended, the
// reason why it ended.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual plan::TpShard shard() const = 0;
  virtual LocalShare local() const = 0;
  // Joins the group and waits until all ranks are connected. The collective
  // lives as long as this object.
  virtual absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) = 0;
  // Makes this rank's offer, waits for the offers of all ranks, and returns
  // what they agree on.
  virtual absl::StatusOr<worker::RankAgreement> Agree(
      const worker::RankOffer& offer) = 0;
};

}  // namespace kvasir::cli
