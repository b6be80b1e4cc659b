#include "router/identity/quota.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

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

absl::Status RequestPlace::CountSamples(uint32_t n) {
  base::MutexLock lock(&mutex_);
  if (quota_ == nullptr || n <= 1) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(quota_->CountSamples(n));
  samples_ = n;
  return absl::OkStatus();
}

void RequestPlace::Leave() {
  std::shared_ptr<TenantQuota> quota;
  uint32_t samples;
  {
    base::MutexLock lock(&mutex_);
    quota = std::move(quota_);
    samples = samples_;
  }
  if (quota != nullptr) quota->Leave(samples);
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
    return IsFull(most);
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

absl::Status TenantQuota::IsFull(uint32_t most) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "tenant '", tenant_, "' runs ", running_, " requests (each sample counts",
      " as one), and its quota's concurrent_requests is ", most,
      ": try again when one has ended"));
}

absl::Status TenantQuota::CountSamples(uint32_t n) {
  base::MutexLock lock(&mutex_);
  const uint32_t most = limits_.concurrent_requests();
  if (most > 0 && n > most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "n is ", n, ", but the quota of tenant '", tenant_, "' allows ", most,
        " concurrent_requests, and each sample counts as one"));
  }
  // Enter has already added one sample of this request to running_.
  if (most > 0 && uint64_t{running_} + n - 1 > most) return IsFull(most);
  running_ += n - 1;
  return absl::OkStatus();
}

void TenantQuota::Leave(uint32_t samples) {
  base::MutexLock lock(&mutex_);
  running_ -= samples;
}

bool TenantQuota::idle() const {
  return running() == 0 && bytes_->used_bytes() == 0;
}

uint32_t TenantQuota::running() const {
  base::MutexLock lock(&mutex_);
  return running_;
}

}  // namespace kvasir::router
