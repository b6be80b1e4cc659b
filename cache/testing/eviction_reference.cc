#include "cache/testing/eviction_reference.h"

#include <algorithm>
#include <cmath>

namespace kvasir::cache {

EvictionReference::EvictionReference(const plan::ResolvedEviction& rule,
                                     const plan::EvictionCounts& counts,
                                     int64_t prompt_tokens)
    : rule_(rule), counts_(counts), prompt_(prompt_tokens) {}

std::vector<int32_t> EvictionReference::Append(float key_error,
                                               float value_error) {
  std::vector<int32_t> stayed;
  if (length_ % counts_.every_tokens == 0 || length_ == prompt_) {
    stayed = Evict();
  }
  slots_.push_back({length_++, 0, key_error, value_error});
  return stayed;
}

float EvictionReference::WorthOf(const Slot& slot) const {
  const auto norm = [this](float Slot::*field, float x) {
    float least = 0;
    float greatest = 0;
    bool first = true;
    const auto begin = static_cast<size_t>(rule_.sinks);
    const size_t end = slots_.size() - static_cast<size_t>(rule_.recent);
    for (size_t i = begin; i < end; ++i) {
      const float y = slots_[i].*field;
      if (first || y < least) least = y;
      if (first || y > greatest) greatest = y;
      first = false;
    }
    return greatest > least ? (x - least) / (greatest - least) : 0.0F;
  };
  const float mass = norm(&Slot::mass, slot.mass);
  const float key = 1.0F - norm(&Slot::key_error, slot.key_error);
  const float value = 1.0F - norm(&Slot::value_error, slot.value_error);
  return rule_.lambda * mass +
         (1.0F - rule_.lambda) * (rule_.friendliness * (key + value));
}

std::vector<int32_t> EvictionReference::Evict() {
  int64_t kept = counts_.budget_tokens;
  if (kept == 0) {
    kept = std::max(
        {std::llround(counts_.budget_ratio * static_cast<double>(prompt_)),
         static_cast<long long>(counts_.least_tokens), 1LL});
  }
  const auto held = static_cast<int64_t>(slots_.size());
  if (held <= kept) return {};
  const int64_t recent = rule_.scored ? rule_.recent : kept - rule_.sinks;
  std::vector<bool> stays(slots_.size(), false);
  for (int64_t i = 0; i < held; ++i) {
    stays[static_cast<size_t>(i)] = i < rule_.sinks || i >= held - recent;
  }
  // Chooses the slots that stay one by one, each time the first slot with the
  // highest score.
  for (int64_t n = kept - rule_.sinks - recent; n > 0; --n) {
    int64_t best = -1;
    float worth = 0;
    for (int64_t i = rule_.sinks; i < held - recent; ++i) {
      if (stays[static_cast<size_t>(i)]) continue;
      const float w = WorthOf(slots_[static_cast<size_t>(i)]);
      if (best < 0 || w > worth) {
        best = i;
        worth = w;
      }
    }
    stays[static_cast<size_t>(best)] = true;
  }
  std::vector<int32_t> stayed;
  std::vector<Slot> left;
  for (int64_t i = 0; i < held; ++i) {
    if (!stays[static_cast<size_t>(i)]) continue;
    stayed.push_back(static_cast<int32_t>(i));
    left.push_back(slots_[static_cast<size_t>(i)]);
    left.back().mass *= rule_.decay;
  }
  slots_ = left;
  return stayed;
}

}  // namespace kvasir::cache
