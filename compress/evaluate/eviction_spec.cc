#include "compress/evaluate/eviction_spec.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/layout.h"
#include "model/shapes/attention_shape.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

absl::StatusOr<EvictionSpec> ParseEvictionSpec(
    const std::string& name, const std::string& budget,
    const plan::EvictionSettings& settings, uint64_t seed) {
  EvictionSpec spec{.name = absl::StrCat(name, " ", budget),
                    .settings = settings};
  KVASIR_ASSIGN_OR_RETURN(spec.settings.budget,
                          plan::ParseEvictionBudget(budget));
  if (name == "recent") {
    spec.settings.method = plan::EvictionMethod::kStreaming;
    spec.settings.sinks = 0;
    return spec;
  }
  if (name == "random") {
    spec.settings.method = plan::EvictionMethod::kH2o;
    spec.lot = seed;
    return spec;
  }
  const absl::StatusOr<plan::EvictionMethod> method =
      plan::ParseEvictionMethod(name);
  if (!method.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        method.status().message(), "; to be measured also recent or random"));
  }
  spec.settings.method = *method;
  return spec;
}

absl::StatusOr<EvictingCandidate> Evicting(const Candidate& candidate,
                                           const EvictionSpec& spec) {
  const model::DecoderSpec& model = candidate.decoder->spec();
  const plan::AttentionShape shape = model::AttentionShapeOf(model);
  const bool planned = candidate.decoder->plan().has_value();
  kvasir::v1::KvPlan plan = planned ? *candidate.decoder->plan()
                                    : FullRankPlan(shape, kvasir::v1::BF16);
  plan::EvictionSettings settings = spec.settings;
  if (!planned && !settings.recent.has_value() && candidate.exact_window > 0) {
    settings.recent = static_cast<uint32_t>(candidate.exact_window);
  }
  KVASIR_RETURN_IF_ERROR(plan::ApplyEviction(settings, shape, &plan));
  KVASIR_RETURN_IF_ERROR(plan::ValidatePlan(plan, shape));
  EvictingCandidate evicting{.rules = std::make_unique<EvictionRules>(),
                             .candidate = candidate};
  for (int l = 0; l < plan.layers_size(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(
        std::optional<plan::LayerEviction> layer,
        plan::ResolveLayerEviction(plan.layers(l), shape, l));
    std::optional<EvictionRule>& rule = evicting.rules->emplace_back();
    if (!layer.has_value()) continue;
    rule = EvictionRule{.layer = *std::move(layer)};
    if (spec.lot.has_value()) rule->lot = *spec.lot + static_cast<uint64_t>(l);
  }
  Candidate& out = evicting.candidate;
  out.eviction = evicting.rules.get();
  absl::StrAppend(&out.model, " + ", spec.name);
  if (planned) {
    KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                            cache::PageLayout::Create(plan, shape, {}));
    out.kv_bytes_per_token = layout.marginal_bytes_per_token();
    out.kv_payload_bytes_per_token = layout.marginal_payload_bytes_per_token();
  }
  return evicting;
}

}  // namespace kvasir::compress
