// Evictions to be measured on any candidate, by name:
//
//   q-hitter, h2o, streaming   as plan::ParseEvictionMethod has them
//   recent                     the latest tokens alone: streaming without
//                              sinks, but for those that a plan keeps exact
//   random                     others than sinks and recent tokens by lot
//
// with one budget each. A window of the text is one prompt.
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
  std::string name;  // "q-hitter 0.2", for reports
  std::string method;
  plan::EvictionSettings settings;
  bool fewest_sinks = false;  // those that are exact, whatever `settings` say
  std::optional<uint64_t> lot;
};
// `settings` are those of all names but for method and budget. INVALID_ARGUMENT
// for a name or a budget that is none.
absl::StatusOr<EvictionSpec> ParseEvictionSpec(
    const std::string& name, const std::string& budget,
    const plan::EvictionSettings& settings, uint64_t seed);

// The eviction on top of a plan, or of whole keys and values of which a
// baseline keeps `exact` tokens. Errors: plan::ApplyEviction's and
// ValidatePlan's; INVALID_ARGUMENT where tokens that a baseline keeps exact
// would go.
absl::StatusOr<kvasir::v1::KvPlan> EvictingPlan(
    const EvictionSpec& spec, const std::optional<kvasir::v1::KvPlan>& plan,
    const plan::ExactTokens& exact, const plan::AttentionShape& shape);

// Owns: the rules. `candidate.eviction` points to them.
struct EvictingCandidate {
  std::unique_ptr<EvictionRules> rules;
  Candidate candidate;
};
// `candidate` with the eviction on top of its plan, or of whole keys and
// values. Bytes per token are those of a slot; a plan's with its scores.
// Errors: EvictingPlan's.
absl::StatusOr<EvictingCandidate> Evicting(const Candidate& candidate,
                                           const EvictionSpec& spec);

}  // namespace kvasir::compress
