#include "plan/eviction.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvasir::plan {
namespace {

using kvasir::v1::Eviction;
using kvasir::v1::LayerPlan;

constexpr uint32_t kSinks = 4;
constexpr uint32_t kRecent = 64;
// By default, a budget that is given in slots has 1 / kRecentPart of its slots
// for recent tokens.
constexpr uint32_t kRecentPart = 4;

uint32_t RecentOf(const EvictionSettings& settings, const LayerPlan& layer) {
  if (settings.recent.has_value()) return *settings.recent;
  const uint32_t tokens = settings.budget.tokens;
  const uint32_t recent =
      tokens > 0 ? std::max(tokens / kRecentPart, 1U) : kRecent;
  return std::max(
      {recent, layer.key().exact_window(), layer.value().exact_window()});
}

// Stores full-rank keys before RoPE. With rolling positions, a key's position
// is its slot index, which changes when tokens are evicted, so keys must be
// rotated when they are read. Keys with static ranges stay as they are: their
// ranges were measured on rotated keys.
void StoreBeforeRope(LayerPlan* layer) {
  for (kvasir::v1::Part& part : *layer->mutable_key()->mutable_parts()) {
    if (part.has_full() && part.stored() == kvasir::v1::POST_ROPE &&
        !part.codec().has_channel_static()) {
      part.set_stored(kvasir::v1::PRE_ROPE);
    }
  }
}

}  // namespace

absl::StatusOr<EvictionMethod> ParseEvictionMethod(absl::string_view name) {
  if (name == "q-hitter") return EvictionMethod::kQHitter;
  if (name == "h2o") return EvictionMethod::kH2o;
  if (name == "streaming") return EvictionMethod::kStreaming;
  return absl::InvalidArgumentError(
      absl::StrCat("'", name,
                   "' is not an eviction method: want q-hitter, h2o or "
                   "streaming"));
}

absl::Status ApplyEviction(const EvictionSettings& settings,
                           const AttentionShape& shape,
                           kvasir::v1::KvPlan* plan) {
  bool any = false;
  for (int l = 0; l < plan->layers_size(); ++l) {
    LayerPlan* layer = plan->mutable_layers(l);
    layer->clear_eviction();
    if (l >= shape.num_layers() ||
        shape.layers[static_cast<size_t>(l)].sliding_window > 0) {
      continue;
    }
    any = true;
    if (settings.rolling) StoreBeforeRope(layer);
    Eviction* eviction = layer->mutable_eviction();
    eviction->set_budget(settings.budget.tokens);
    eviction->set_budget_ratio(settings.budget.ratio);
    eviction->set_sinks(
        settings.sinks.value_or(std::max(kSinks, layer->exact_sinks())));
    eviction->set_recent(RecentOf(settings, *layer));
    eviction->set_lambda(
        settings.method == EvictionMethod::kQHitter ? settings.lambda : 1.0);
    eviction->set_decay(settings.decay);
    eviction->set_positions(settings.rolling ? Eviction::ROLLING
                                             : Eviction::ORIGINAL);
    eviction->set_every_tokens(settings.every_tokens);
    eviction->set_observation_window(settings.observation_window);
    eviction->set_half_friendliness(settings.half_friendliness);
    eviction->set_others(settings.method == EvictionMethod::kStreaming
                             ? Eviction::LATEST
                             : Eviction::HITTERS);
  }
  if (any) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "no layer can evict tokens: every layer has a sliding window, which "
      "already drops the tokens outside it");
}

}  // namespace kvasir::plan
