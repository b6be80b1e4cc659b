// The checks of ValidatePlan that concern a part's space (the form in which
// keys or values are stored) and its lifts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/codec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// The properties of the model that the checks of one layer need.
struct LayerFacts {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t num_pairs = 0;  // 0: the layer does not rotate
  bool qk_norm = false;

  bool rotates() const { return num_pairs > 0; }
  int64_t non_rotary_dims() const { return head_dim - 2 * num_pairs; }
};

// Checks that every head is in exactly one of the groups.
template <typename Groups>
absl::Status CheckPartition(const PlanPlace& where, const Groups& groups,
                            int64_t num_heads) {
  std::vector<int> owner(static_cast<size_t>(num_heads), -1);
  for (int g = 0; g < groups.size(); ++g) {
    if (groups.Get(g).heads().empty()) {
      return where.Refuse("group ", g, " has no heads");
    }
    for (uint32_t head : groups.Get(g).heads()) {
      if (head >= num_heads) {
        return where.Refuse("group ", g, " names head ", head,
                            ", but the layer has only ", num_heads,
                            " KV heads");
      }
      if (owner[head] >= 0) {
        return where.Refuse("head ", head, " is in group ", owner[head],
                            " and in group ", g);
      }
      owner[head] = g;
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    if (owner[static_cast<size_t>(head)] < 0) {
      return where.Refuse("head ", head, " is in no group");
    }
  }
  return absl::OkStatus();
}

// Records which part of a side covers each dimension of each head, so that no
// dimension is covered twice. The table has a row for each head, a column for
// each RoPE pair, and a last column for the dimensions that do not rotate.
class Coverage {
 public:
  explicit Coverage(const LayerFacts& facts)
      : num_heads_(facts.num_heads), columns_(facts.num_pairs + 1) {}

  int64_t non_rotary() const { return columns_ - 1; }

  absl::Status Take(const PlanPlace& where, int64_t head, int64_t column) {
    if (whole_owner_ >= 0) return Twice(where, head, column, whole_owner_);
    if (owner_.empty()) {
      owner_.assign(static_cast<size_t>(num_heads_ * columns_), -1);
    }
    int8_t& owner = owner_[static_cast<size_t>(head * columns_ + column)];
    if (owner >= 0) return Twice(where, head, column, owner);
    owner = static_cast<int8_t>(where.joint() ? kFirstJoint + where.part
                                              : where.part);
    return absl::OkStatus();
  }

  // Marks all dimensions of all heads as covered.
  absl::Status TakeWhole(const PlanPlace& where) {
    if (where.part > 0) {
      return where.Refuse(
          "a full space stores all dims, but part 0 already covers "
          "some: a full space must be the only part");
    }
    whole_owner_ = where.part;
    return absl::OkStatus();
  }

 private:
  // Joint part number i is stored as kFirstJoint + i in owner_.
  static constexpr int kFirstJoint = 64;

  absl::Status Twice(const PlanPlace& where, int64_t head, int64_t column,
                     int owner) const {
    const std::string dims = column == non_rotary()
                                 ? std::string("the dims without rotation")
                                 : absl::StrCat("RoPE pair ", column);
    return where.Refuse(dims, " of head ", head, ": already covered by ",
                        owner < kFirstJoint
                            ? absl::StrCat("part ", owner)
                            : absl::StrCat("joint part ", owner - kFirstJoint));
  }

  int64_t num_heads_;
  int64_t columns_;
  int whole_owner_ = -1;
  // [num_heads, columns]: the part that covers the dimensions, or -1; empty
  // until the first Take.
  std::vector<int8_t> owner_;
};

// Checks the part's `stored` field (before or after RoPE, or never rotated).
// The allowed values depend on the side and on whether the layer rotates keys.
absl::Status CheckStored(const PlanPlace& where, const kvasir::v1::Part& part,
                         const LayerFacts& facts);

// Checks that the part's lifts are allowed for its `stored` field (before or
// after RoPE).
absl::Status CheckUses(const PlanPlace& where, const kvasir::v1::Part& part,
                       const LayerFacts& facts);

// Checks the heads, pairs and ranks of the space, marks the dimensions that it
// covers in `coverage` and returns its latents.
absl::StatusOr<std::vector<PlannedLatent>> CheckSpace(
    const PlanPlace& where, const kvasir::v1::Part& part,
    const LayerFacts& facts, Coverage& coverage);

// Like CheckUses and CheckSpace, for a joint part. Marks the dimensions that it
// covers on both sides.
absl::StatusOr<std::vector<PlannedLatent>> CheckJointSpace(
    const PlanPlace& where, const kvasir::v1::Part& part,
    const LayerFacts& facts, Coverage& key, Coverage& value);

}  // namespace kvasir::plan
