#include "cache/eviction/eviction_schedule.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace kvasir::cache {

int64_t KeptSlots(const plan::EvictionCounts& counts, int64_t prompt_tokens) {
  if (counts.budget_tokens > 0) return counts.budget_tokens;
  // Rounds to the nearest integer, because 0.29 * 100 is slightly below 29 in
  // floating point.
  const int64_t share =
      std::llround(counts.budget_ratio * static_cast<double>(prompt_tokens));
  return std::max({share, counts.least_tokens, int64_t{1}});
}

plan::EvictionCounts OfPrompt(const plan::EvictionCounts& counts,
                              int64_t prompt_tokens) {
  plan::EvictionCounts fixed = counts;
  if (!counts.evicts()) return fixed;
  fixed.budget_tokens = KeptSlots(counts, prompt_tokens);
  fixed.budget_ratio = 0;
  return fixed;
}

int64_t MostSlots(const plan::EvictionCounts& counts, int64_t length) {
  if (!counts.evicts()) return length;
  return std::min(length, KeptSlots(counts, length) + counts.every_tokens);
}

EvictionSchedule::EvictionSchedule(const plan::EvictionCounts& counts,
                                   int64_t prompt_tokens)
    : prompt_(prompt_tokens),
      every_(counts.every_tokens),
      window_(counts.observation_window) {
  KVASIR_CHECK(prompt_tokens >= 1);
  if (counts.evicts()) kept_ = KeptSlots(counts, prompt_tokens);
}

bool EvictionSchedule::IsPoint(int64_t length) const {
  return every_ > 0 && length > kept_ &&
         (length % every_ == 0 || length == prompt_);
}

std::optional<int64_t> EvictionSchedule::NextPoint(int64_t length) const {
  if (every_ == 0) return std::nullopt;
  const int64_t from = std::max(length, kept_);
  const int64_t multiple = (from / every_ + 1) * every_;
  return from < prompt_ ? std::min(multiple, prompt_) : multiple;
}

int64_t EvictionSchedule::LastPoint(int64_t length) const {
  if (every_ == 0) return 0;
  int64_t last = length / every_ * every_;
  if (prompt_ <= length) last = std::max(last, prompt_);
  return last > kept_ ? last : 0;
}

int64_t EvictionSchedule::SlotsBefore(int64_t length) const {
  if (length == 0) return 0;
  return SlotsAfter(length - 1) + 1;
}

int64_t EvictionSchedule::SlotsAfter(int64_t length) const {
  const int64_t last = LastPoint(length);
  return last == 0 ? length : kept_ + length - last;
}

int64_t EvictionSchedule::FirstCounted(int64_t begin, int64_t end) const {
  KVASIR_CHECK(begin < end);
  if (window_ == 0 || begin >= prompt_) return begin;
  KVASIR_CHECK(end <= prompt_);
  // The first eviction point that is after the last query, end - 1.
  const std::optional<int64_t> next = NextPoint(end - 1);
  const int64_t until = std::min(next.value_or(prompt_), prompt_);
  return std::clamp(until - window_, begin, end);
}

}  // namespace kvasir::cache
