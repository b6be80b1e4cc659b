#include "compress/methods/keep_search.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::compress {
namespace {

constexpr double kLeastKeep = 1e-3;
constexpr double kTolerance = 1e-3;
// The search ends when a plan takes at least this share of the bytes that are
// available.
constexpr double kCloseShare = 0.998;
// Each guess keeps a distance from both ends of the search interval, at least
// this share of its length. So the interval shrinks in every step.
constexpr double kMargin = 0.1;

}  // namespace

absl::StatusOr<FoundPlan> PlanForBytes(const KeepSearch& search) {
  KVASIR_ASSIGN_OR_RETURN(kvasir::v1::KvPlan whole, search.plan(1.0));
  KVASIR_ASSIGN_OR_RETURN(double high_bytes, search.bytes(whole));
  if (high_bytes <= search.want_bytes) {
    return FoundPlan{std::move(whole), 1.0, high_bytes};
  }
  std::optional<FoundPlan> best;
  double low = 0.0;
  double low_bytes = 0.0;
  double high = 1.0;
  double least_bytes = high_bytes;
  absl::Status refusal;
  while (high - low > kTolerance) {
    const double slope = (high_bytes - low_bytes) / (high - low);
    const double margin = kMargin * (high - low);
    const double keep = std::clamp(
        slope > 0.0 ? low + (search.want_bytes - low_bytes) / slope : low,
        std::max(low + margin, kLeastKeep), high - margin);
    absl::StatusOr<kvasir::v1::KvPlan> plan = search.plan(keep);
    if (absl::IsInvalidArgument(plan.status())) {
      refusal = plan.status();
      low = keep;
      continue;
    }
    KVASIR_RETURN_IF_ERROR(plan.status());
    KVASIR_ASSIGN_OR_RETURN(const double bytes, search.bytes(*plan));
    least_bytes = std::min(least_bytes, bytes);
    if (bytes > search.want_bytes) {
      high = keep;
      high_bytes = bytes;
      continue;
    }
    low = keep;
    low_bytes = bytes;
    if (!best || bytes >= best->bytes) {
      best = FoundPlan{*std::move(plan), keep, bytes};
    }
    if (bytes >= kCloseShare * search.want_bytes) break;
  }
  if (best) return *std::move(best);
  return absl::InvalidArgumentError(absl::StrCat(
      "no plan of at most ", search.want_bytes,
      " KV bytes per token was found: the smallest plan takes ", least_bytes,
      refusal.ok() ? "" : absl::StrCat(" (", refusal.message(), ")")));
}

}  // namespace kvasir::compress
