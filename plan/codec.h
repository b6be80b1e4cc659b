// The checks of ValidatePlan that concern a part's codec: its bits, ranges and
// transform.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// The place in a plan to which an error refers. Refuse() puts it at the
// beginning of the error: "layer 3 key part 0: ".
struct PlanPlace {
  int64_t layer = 0;
  Side side = Side::kKey;
  int part = -1;
  // If not empty, used instead of the side's name: "joint", "eviction"
  // or "selection".
  absl::string_view section = "";

  bool joint() const { return section == kJoint; }
  static constexpr absl::string_view kJoint = "joint";

  template <typename... Args>
  absl::Status Refuse(const Args&... args) const {
    std::string place = absl::StrCat(
        "layer ", layer, " ", section.empty() ? SideName(side) : section);
    if (part >= 0) absl::StrAppend(&place, " part ", part);
    return absl::InvalidArgumentError(absl::StrCat(place, ": ", args...));
  }
};

// The latent of one group: `width` numbers per slot.
struct PlannedLatent {
  int group = 0;
  int64_t width = 0;
};

// Checks that the codec can store latents of these widths.
absl::Status CheckStorage(const PlanPlace& where,
                          const kvasir::v1::Codec& codec,
                          const std::vector<PlannedLatent>& latents);

// Checks that the codec's transform is allowed for the part's space and for its
// `stored` field (before or after RoPE).
absl::Status CheckTransform(const PlanPlace& where,
                            const kvasir::v1::Part& part);

}  // namespace kvasir::plan
