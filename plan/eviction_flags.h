// Flags that put eviction on top of a plan, of all commands that take one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "plan/attention_shape.h"
#include "plan/eviction.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct EvictionFlags {
  std::string method;  // empty: the plan stays as it is
  std::string budget = "0.2";
  plan::EvictionSettings settings;  // its method and budget are not read

  bool operator==(const EvictionFlags&) const = default;
};

// `of_plan`: comes on top of a plan that is there; else of one that is made.
void AddEvictionFlags(CLI::App* command, EvictionFlags& flags, bool of_plan);

// All but method and budget, for a command with words of its own for these.
void AddEvictionSettings(CLI::App* command, plan::EvictionSettings& settings);

// INVALID_ARGUMENT for flags that nothing reads without --eviction.
absl::Status CheckEvictionIsUsed(const EvictionFlags& flags);

// Puts the eviction of the flags, if any, on a plan of such a model, in place
// of the plan's own, and names it in the plan. `others`: layers that stay as
// they are. Errors: plan::ValidatePlan's, and INVALID_ARGUMENT where no layer
// is left that can evict.
absl::Status PutEviction(const EvictionFlags& flags,
                         const plan::AttentionShape& shape,
                         kvasir::v1::KvPlan* plan,
                         const std::vector<int>& others = {});

}  // namespace kvasir::cli
