#include "compress/evaluate/eviction_spec.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "model/shapes/attention_shape.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

absl::StatusOr<EvictionSpec> ParseEvictionSpec(
    const std::string& name, const std::string& budget,
    const plan::EvictionSettings& settings, uint64_t seed) {
  EvictionSpec spec{.name = absl::StrCat(name, " ", budget),
                    .method = name,
                    .settings = settings};
  KVASIR_ASSIGN_OR_RETURN(spec.settings.budget,
                          plan::ParseEvictionBudget(budget));
  if (name == "recent") {
    spec.settings.method = plan::EvictionMethod::kStreaming;
    spec.settings.sinks = 0;
    spec.fewest_sinks = true;
    return spec;
  }
  if (name == "random") {
    spec.settings.method = plan::EvictionMethod::kH2o;
    spec.random_seed = seed;
    return spec;
  }
  const absl::StatusOr<plan::EvictionMethod> method =
      plan::ParseEvictionMethod(name);
  if (!method.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(method.status().message(),
                     "; an evaluation also accepts recent or random"));
  }
  spec.settings.method = *method;
  return spec;
}

absl::StatusOr<kvasir::v1::KvPlan> EvictingPlan(
    const EvictionSpec& spec, const std::optional<kvasir::v1::KvPlan>& plan,
    const plan::ExactTokens& exact, const plan::AttentionShape& shape) {
  kvasir::v1::KvPlan evicts =
      plan.has_value() ? *plan : plan::FullRankPlan(shape, kvasir::v1::BF16);
  const uint32_t exact_sinks = exact.sinks.value_or(0);
  const uint32_t exact_window = exact.window.value_or(0);
  // ApplyEviction keeps at least the tokens that the plan stores exactly. If
  // the candidate has no plan, the baseline's exact tokens are written into
  // `evicts` only while ApplyEviction runs.
  const auto set_exact = [&](uint32_t sinks, uint32_t window) {
    if (plan.has_value()) return;
    for (kvasir::v1::LayerPlan& layer : *evicts.mutable_layers()) {
      layer.set_exact_sinks(sinks);
      layer.mutable_key()->set_exact_window(window);
    }
  };
  set_exact(exact_sinks, exact_window);
  KVASIR_RETURN_IF_ERROR(plan::ApplyEviction(spec.settings, shape, &evicts));
  for (kvasir::v1::LayerPlan& layer : *evicts.mutable_layers()) {
    if (!layer.has_eviction()) continue;
    if (spec.fewest_sinks) {
      layer.mutable_eviction()->set_sinks(layer.exact_sinks());
    }
    const kvasir::v1::Eviction& eviction = layer.eviction();
    if (!plan.has_value() &&
        (eviction.sinks() < exact_sinks || eviction.recent() < exact_window)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens that a baseline keeps exact must not be "
                       "evicted: the eviction must keep at least ",
                       exact_sinks, " sinks and ", exact_window,
                       " recent tokens, but keeps ", eviction.sinks(), " and ",
                       eviction.recent()));
    }
  }
  set_exact(0, 0);
  KVASIR_RETURN_IF_ERROR(plan::ValidatePlan(evicts, shape));
  return evicts;
}

absl::StatusOr<EvictingCandidate> Evicting(const Candidate& candidate,
                                           const EvictionSpec& spec) {
  const model::DecoderSpec& model = candidate.decoder->spec();
  const plan::AttentionShape shape = model::AttentionShapeOf(model);
  const bool planned = candidate.decoder->plan().has_value();
  KVASIR_ASSIGN_OR_RETURN(
      const kvasir::v1::KvPlan plan,
      EvictingPlan(spec, candidate.decoder->plan(),
                   {.sinks = static_cast<uint32_t>(candidate.exact_sinks),
                    .window = static_cast<uint32_t>(candidate.exact_window)},
                   shape));
  EvictingCandidate evicting{.rules = std::make_unique<EvictionRules>(),
                             .candidate = candidate};
  for (int l = 0; l < plan.layers_size(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(
        std::optional<plan::LayerEviction> layer,
        plan::ResolveLayerEviction(plan.layers(l), shape, l));
    std::optional<EvictionRule>& rule = evicting.rules->emplace_back();
    if (!layer.has_value()) continue;
    rule = EvictionRule{.layer = *std::move(layer)};
    if (spec.random_seed.has_value())
      rule->random_seed = *spec.random_seed + static_cast<uint64_t>(l);
  }
  Candidate& out = evicting.candidate;
  out.eviction = evicting.rules.get();
  absl::StrAppend(&out.model, " + ", spec.name);
  KVASIR_ASSIGN_OR_RETURN(cache::PageLayout layout,
                          cache::PageLayout::Create(plan, shape, {}));
  if (planned) {
    out.kv_bytes_per_token = layout.marginal_bytes_per_token();
    out.kv_payload_bytes_per_token = layout.marginal_payload_bytes_per_token();
    out.fixed_bytes_per_sequence = layout.fixed_bytes_per_sequence();
  }
  out.evicts = SummarizeEviction(plan, layout);
  if (out.evicts.has_value()) out.evicts->method = spec.method;
  out.layout = std::make_shared<cache::PageLayout>(std::move(layout));
  return evicting;
}

}  // namespace kvasir::compress
