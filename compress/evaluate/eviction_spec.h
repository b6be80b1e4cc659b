// Names of evictions that can be measured with any candidate:
//
// - "q-hitter", "h2o" and "streaming" are the methods of
//   plan::ParseEvictionMethod.
// - "recent" keeps only the latest tokens and those that a plan stores exactly.
// - "random" keeps sinks and recent tokens, and a random choice of the others.
//
// The budget is the same for all layers. Each window of the text is read as one
// prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compress/evaluate/evaluate.h"
#include "compress/oracle/layer_forward.h"
#include "plan/attention_shape.h"
#include "plan/eviction.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct EvictionSpec {
  std::string name;  // such as "q-hitter 0.2", for reports
  std::string method;
  plan::EvictionSettings settings;
  // If true, the sinks are only the tokens that are stored exactly, whatever
  // `settings` say.
  bool fewest_sinks = false;
  std::optional<uint64_t> random_seed;
};
// Makes the spec of the eviction `name` with this budget. All other settings
// come from `settings`, whose method and budget are ignored. INVALID_ARGUMENT
// for an unknown name or an invalid budget.
absl::StatusOr<EvictionSpec> ParseEvictionSpec(
    const std::string& name, const std::string& budget,
    const plan::EvictionSettings& settings, uint64_t seed);

// Returns `plan` with the eviction added. If there is no plan, starts from one
// that compresses nothing. `exact` gives the numbers of first and latest tokens
// that a baseline stores exactly.
// Errors: those of plan::ApplyEviction and ValidatePlan; INVALID_ARGUMENT if
//   tokens that a baseline keeps exact would be evicted.
absl::StatusOr<kvasir::v1::KvPlan> EvictingPlan(
    const EvictionSpec& spec, const std::optional<kvasir::v1::KvPlan>& plan,
    const plan::ExactTokens& exact, const plan::AttentionShape& shape);

// A candidate with eviction.
// Owns: the rules, to which `candidate.eviction` points.
struct EvictingCandidate {
  std::unique_ptr<EvictionRules> rules;
  Candidate candidate;
};
// Returns `candidate` with the eviction added to its plan. A candidate without
// a plan gets one that compresses nothing. The bytes per token are those of one
// token that is not evicted. With a plan they include its eviction score.
// Errors: those of EvictingPlan.
absl::StatusOr<EvictingCandidate> Evicting(const Candidate& candidate,
                                           const EvictionSpec& spec);

}  // namespace kvasir::compress
