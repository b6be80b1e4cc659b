// The flags that add eviction to a plan, shared by all commands that use a
// plan.
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
  plan::EvictionSettings settings;  // without its method and budget

  bool operator==(const EvictionFlags&) const = default;
};

// `of_plan`: the eviction is added to an existing plan; otherwise to a plan
// that the command makes.
void AddEvictionFlags(CLI::App* command, EvictionFlags& flags, bool of_plan);

// Adds all flags except method and budget, for a command that has its own flags
// for these.
void AddEvictionSettings(CLI::App* command, plan::EvictionSettings& settings);

// INVALID_ARGUMENT for flags that have no effect without --eviction.
absl::Status CheckEvictionIsUsed(const EvictionFlags& flags);

// Replaces the eviction of a plan for a model of this shape by that of the
// flags, if any, and names it in the plan. `others` lists layers that are not
// changed. Errors: those of plan::ValidatePlan, and INVALID_ARGUMENT if no
// remaining layer can evict.
absl::Status PutEviction(const EvictionFlags& flags,
                         const plan::AttentionShape& shape,
                         kvasir::v1::KvPlan* plan,
                         const std::vector<int>& others = {});

}  // namespace kvasir::cli
