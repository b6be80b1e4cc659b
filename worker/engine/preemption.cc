#include "worker/engine/preemption.h"

namespace kvasir::worker {
namespace {

// Each new step multiplies the weight of all earlier steps by this factor. So
// mainly the last twenty steps determine the rate.
constexpr double kDecay = 0.95;

}  // namespace

Preemption ChoosePreemption(const PreemptionCosts& costs) {
  const double copy_seconds =
      2 * static_cast<double>(costs.image_bytes) / costs.copy_bytes_per_second;
  const double prefill_seconds = static_cast<double>(costs.recompute_tokens) /
                                 costs.prefill_tokens_per_second;
  return copy_seconds < prefill_seconds ? Preemption::kCopy
                                        : Preemption::kRecompute;
}

void PrefillRate::Add(int64_t tokens, absl::Duration time) {
  if (time <= absl::ZeroDuration()) return;
  tokens_ = kDecay * tokens_ + static_cast<double>(tokens);
  seconds_ = kDecay * seconds_ + absl::ToDoubleSeconds(time);
}

double PrefillRate::tokens_per_second() const {
  return seconds_ > 0 ? tokens_ / seconds_ : kAssumedPrefillTokensPerSecond;
}

}  // namespace kvasir::worker
