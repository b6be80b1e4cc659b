// The flags that add eviction to a plan, shared by all commands that use
// a plan.
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
  std::string method;  // empty: the plan is not changed
  std::string budget = "0.2";
  plan::EvictionSettings settings;  // `method` and `budget` in it are not used

  bool operator==(const EvictionFlags&) const = default;
};

// Adds all eviction flags. If `of_plan` is true, the help texts are for a
// command that uses an existing plan.
void AddEvictionFlags(CLI::App* command, EvictionFlags& flags, bool of_plan);

// Adds all flags except method and budget, for a command that has its own flags
// for these.
void AddEvictionSettings(CLI::App* command, plan::EvictionSettings& settings);

// INVALID_ARGUMENT for flags that have no effect without --eviction.
absl::Status CheckEvictionIsUsed(const EvictionFlags& flags);

// If the flags select an eviction method, replaces the plan's eviction and
// appends the new one to the plan's method name. `shape` describes the plan's
// model. The layers with the indices in `others` do not change.
// Errors: those of plan::ValidatePlan, and INVALID_ARGUMENT if no layer outside
// `others` can evict.
absl::Status PutEviction(const EvictionFlags& flags,
                         const plan::AttentionShape& shape,
                         kvasir::v1::KvPlan* plan,
                         const std::vector<int>& others = {});

}  // namespace kvasir::cli
