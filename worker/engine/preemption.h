// Chooses how a running sequence gives up its pages. They are forgotten and
// computed again, or copied to the host pool and back. The tokens are the same
// either way, so only the predicted time counts. Pure: no clock, no pages.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace kvasir::worker {

// Assumed before a measurement: a copy by one core, and a small model's
// prefill.
inline constexpr double kAssumedCopyBytesPerSecond = 4e9;
inline constexpr double kAssumedPrefillTokensPerSecond = 1000;

enum class Preemption { kRecompute, kCopy };

struct PreemptionCosts {
  int64_t image_bytes = 0;  // copied in each direction
  // Tokens to prefill again. Evicted tokens count, tokens that the prefix index
  // would find do not.
  int64_t recompute_tokens = 0;
  double copy_bytes_per_second = kAssumedCopyBytesPerSecond;
  double prefill_tokens_per_second = kAssumedPrefillTokensPerSecond;
};

// Chooses the copy if both directions together take less time than the prefill.
Preemption ChoosePreemption(const PreemptionCosts& costs);

// The rate of recent prefill steps. Threads: one at a time.
class PrefillRate {
 public:
  // Adds a step. A step that took no time is ignored.
  void Add(int64_t tokens, absl::Duration time);
  // kAssumedPrefillTokensPerSecond before the first step.
  double tokens_per_second() const;

 private:
  double tokens_ = 0;
  double seconds_ = 0;
};

}  // namespace kvasir::worker
