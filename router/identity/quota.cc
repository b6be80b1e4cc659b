#include "router/identity/quota.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace kvasir::router {
namespace {

uint32_t BurstOf(const kvasir::v1::Quota& limits) {
  if (limits.burst() > 0) return limits.burst();
  return static_cast<uint32_t>(
      std::max(1.0, std::ceil(limits.requests_per_second())));
}

size_t BytesOf(const kvasir::v1::Quota& limits) {
  return limits.bytes_in_flight() > 0 ? limits.bytes_in_flight()
                                      : std::numeric_limits<size_t>::max();
}

}  // namespace

void RequestRate::SetLimit(double per_second, uint32_t burst) {
  interval_ =
      per_second > 0 ? absl::Seconds(1) / per_second : absl::ZeroDuration();
  burst_ = (burst - 1) * interval_;
}

absl::Duration RequestRate::Take(absl::Time now) {
  if (interval_ == absl::ZeroDuration()) return absl::ZeroDuration();
  const absl::Duration wait = full_at_ - burst_ - now;
  if (wait > absl::ZeroDuration()) return wait;
  full_at_ = std::max(full_at_, now) + interval_;
  return absl::ZeroDuration();
}

void RequestPlace::Leave() {
  std::shared_ptr<TenantQuota> quota;
  {
    base::MutexLock lock(&mutex_);
    quota = std::move(quota_);
  }
  if (quota != nullptr) quota->Leave();
}

TenantQuota::TenantQuota(const std::string& tenant,
                         const kvasir::v1::Quota& limits)
    : tenant_(tenant),
      bytes_(std::make_shared<ByteBudget>(
          BytesOf(limits),
          ByteBudget::Words{
              .whose = absl::StrCat("requests of tenant '", tenant, "'"),
              .setting = "its quota's bytes_in_flight"})) {
  SetLimits(limits);
}

void TenantQuota::SetLimits(const kvasir::v1::Quota& limits) {
  bytes_->SetLimit(BytesOf(limits));
  base::MutexLock lock(&mutex_);
  limits_ = limits;
  rate_.SetLimit(limits.requests_per_second(), BurstOf(limits));
}

absl::StatusOr<std::shared_ptr<RequestPlace>> TenantQuota::Enter(
    absl::Time now, QuotaLimit* met) {
  *met = QuotaLimit::kNone;
  base::MutexLock lock(&mutex_);
  const uint32_t most = limits_.concurrent_requests();
  if (most > 0 && running_ >= most) {
    *met = QuotaLimit::kConcurrency;
    return absl::ResourceExhaustedError(absl::StrCat(
        "tenant '", tenant_, "' runs ", running_, " requests, and its quota's ",
        "concurrent_requests is ", most, ": try again when one has ended"));
  }
  const absl::Duration wait = rate_.Take(now);
  if (wait > absl::ZeroDuration()) {
    *met = QuotaLimit::kRate;
    return absl::ResourceExhaustedError(absl::StrCat(
        "tenant '", tenant_, "' sends more requests than its quota allows (",
        "requests_per_second ", limits_.requests_per_second(), ", burst ",
        BurstOf(limits_), "): try again in ",
        absl::FormatDuration(absl::Ceil(wait, absl::Milliseconds(1)))));
  }
  ++running_;
  return std::make_shared<RequestPlace>(shared_from_this());
}

void TenantQuota::Leave() {
  base::MutexLock lock(&mutex_);
  --running_;
}

bool TenantQuota::idle() const {
  return running() == 0 && bytes_->used_bytes() == 0;
}

uint32_t TenantQuota::running() const {
  base::MutexLock lock(&mutex_);
  return running_;
}

}  // namespace kvasir::router
