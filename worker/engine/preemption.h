// How a running sequence gives up its pages: forgotten and computed again, or
// copied to the host pool and brought back. Either way its tokens are the same;
// the choice is one of time. Pure: no clock, no pages.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace kvasir::worker {

// Where nobody has measured: a copy by one core, and a small model's prefill.
inline constexpr double kAssumedCopyBytesPerSecond = 4e9;
inline constexpr double kAssumedPrefillTokensPerSecond = 1000;

enum class Preemption { kRecompute, kCopy };

struct PreemptionCosts {
  int64_t image_bytes = 0;  // one way
  // To be prefilled again: all that was seen, evicted tokens too, less what
  // would be found.
  int64_t recompute_tokens = 0;
  double copy_bytes_per_second = kAssumedCopyBytesPerSecond;
  double prefill_tokens_per_second = kAssumedPrefillTokensPerSecond;
};

// Copies where way out and way back take less time than prefilling.
Preemption ChoosePreemption(const PreemptionCosts& costs);

// What steps of prompts take, latest ones first. Threads: one at a time.
class PrefillRate {
 public:
  // A step of so many tokens; one that took no time says nothing.
  void Add(int64_t tokens, absl::Duration time);
  // kAssumedPrefillTokensPerSecond before the first.
  double tokens_per_second() const;

 private:
  double tokens_ = 0;
  double seconds_ = 0;
};

}  // namespace kvasir::worker
