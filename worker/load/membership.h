// The group of a model that is loaded as one of its ranks.
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

// The ranks of one host share its cores and memory, and each has a GPU.
struct LocalShare {
  int index = 0;
  int count = 1;
};

// A rank's terms of joining, before it reads any weight.
struct GroupTerms {
  // Without the fields of the group: its size, collective and timeouts.
  kvasir::v1::RankIdentity identity;
  // RankGroupOptions::combine.
  std::function<absl::StatusOr<worker::CombinedIds>(
      absl::Span<const std::string> tiles_by_rank)>
      combine;
  // NcclOptions::use_device, valid while the rank's device lives; null for the
  // CPU.
  std::function<absl::Status()> use_device;
};

// Threads: one.
// Errors: the reason why the group ended.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual plan::TpShard shard() const = 0;
  virtual LocalShare local() const = 0;
  // Waits until all ranks have joined and are connected. The collective lives
  // as long as this object.
  virtual absl::StatusOr<worker::Collective*> Join(const GroupTerms& terms) = 0;
  // Waits until all ranks have loaded the model.
  virtual absl::StatusOr<worker::RankAgreement> Agree(
      const worker::RankOffer& offer) = 0;
};

}  // namespace kvasir::cli
