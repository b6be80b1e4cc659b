// Names of evictions that can be measured with any candidate:
//
//   q-hitter, h2o, streaming   as in plan::ParseEvictionMethod
//   recent                     only the latest tokens: streaming without sinks,
//                              except those that a plan keeps exact
//   random                     tokens other than sinks and recent ones are kept
//                              at random
//
// Each has one budget, the same for all layers. Candidates read each window of
// the text as one prompt.
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
  // if true, only exact tokens are sinks, whatever `settings` say
  bool fewest_sinks = false;
  std::optional<uint64_t> random_seed;
};
// Makes the spec of the eviction `name` with this budget. `settings` gives the
// other settings; its method and budget are ignored. INVALID_ARGUMENT for an
// unknown name or an invalid budget.
absl::StatusOr<EvictionSpec> ParseEvictionSpec(
    const std::string& name, const std::string& budget,
    const plan::EvictionSettings& settings, uint64_t seed);

// Returns `plan` with the eviction added. Without a plan, the eviction is added
// to a plan of whole keys and values. `exact` gives the numbers of first and
// latest tokens that a baseline stores exactly.
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
// Returns `candidate` with the eviction added to its plan, or to whole keys and
// values if it has no plan. In the result, the bytes per token are those of one
// slot that is held, including the scores that the plan stores.
// Errors: those of EvictingPlan.
absl::StatusOr<EvictingCandidate> Evicting(const Candidate& candidate,
                                           const EvictionSpec& spec);

}  // namespace kvasir::compress
