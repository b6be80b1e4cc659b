// Chooses how to preempt a running sequence: drop its pages and compute them
// again later, or copy them to the host pool and back. Both give the same
// output, so only the predicted time matters. Reads no clock.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace kvasir::worker {

// Rates that are assumed until rates are measured: the copy rate of one CPU
// core, and the prefill rate of a small model.
inline constexpr double kAssumedCopyBytesPerSecond = 4e9;
inline constexpr double kAssumedPrefillTokensPerSecond = 1000;

enum class Preemption { kRecompute, kCopy };

struct PreemptionCosts {
  // The size of the sequence's pages, which are copied to the host pool and
  // later back.
  int64_t image_bytes = 0;
  // Tokens to prefill again if the pages are dropped. Includes tokens whose
  // slots were evicted; excludes tokens that are probably still in the
  // prefix cache.
  int64_t recompute_tokens = 0;
  double copy_bytes_per_second = kAssumedCopyBytesPerSecond;
  double prefill_tokens_per_second = kAssumedPrefillTokensPerSecond;
};

// Chooses the copy if copying out and back takes less time than the prefill.
Preemption ChoosePreemption(const PreemptionCosts& costs);

// Measures the rate of recent prefill steps.
// Threads: one thread at a time may call methods.
class PrefillRate {
 public:
  // Adds a measured step of `tokens` tokens. Ignored if `time` is not positive.
  void Add(int64_t tokens, absl::Duration time);
  // Returns kAssumedPrefillTokensPerSecond before the first Add.
  double tokens_per_second() const;

 private:
  double tokens_ = 0;
  double seconds_ = 0;
};

}  // namespace kvasir::worker
