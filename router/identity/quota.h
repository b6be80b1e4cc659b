// Limits how much a tenant may use: requests per second, concurrent
// requests, and bytes. Callers pass the time, which must come from a clock
// that never jumps.
// Threads: all methods may be called from any thread, except those
// of RequestRate.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/identity.pb.h"
#include "router/base/byte_budget.h"

namespace kvasir::router {

// A token bucket, which limits the rate of requests. Its only state is the time
// at which the bucket will be full again. So rounding errors do not add up.
// Threads: only one thread at a time may use it.
class RequestRate {
 public:
  // Sets the limits. If `per_second` is 0, there is no limit. `burst` must be
  // at least 1.
  void SetLimit(double per_second, uint32_t burst);

  // Takes a token for a request. Returns zero if the request is accepted.
  // Otherwise returns the time until the bucket has a token again.
  absl::Duration Take(absl::Time now);

 private:
  absl::Duration interval_ = absl::ZeroDuration();
  absl::Duration burst_ = absl::ZeroDuration();
  absl::Time full_at_ = absl::InfinitePast();
};

class TenantQuota;

// One running request's part of its tenant's concurrent requests. Each sample
// counts as one. Leave or the destructor frees it.
// Threads: its methods may be called from any thread.
class RequestPlace {
 public:
  explicit RequestPlace(std::shared_ptr<TenantQuota> quota)
      : quota_(std::move(quota)) {}
  ~RequestPlace() { Leave(); }
  RequestPlace(const RequestPlace&) = delete;
  RequestPlace& operator=(const RequestPlace&) = delete;

  // Call once, when the number of samples is known. Before, the request counts
  // as one sample. Errors: INVALID_ARGUMENT if `n` is above the tenant's limit,
  // RESOURCE_EXHAUSTED if `n` samples do not fit now.
  absl::Status CountSamples(uint32_t n) ABSL_LOCKS_EXCLUDED(mutex_);
  // Call when the request has ended. Further calls have no effect.
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  base::Mutex mutex_;
  std::shared_ptr<TenantQuota> quota_ ABSL_GUARDED_BY(mutex_);
  uint32_t samples_ ABSL_GUARDED_BY(mutex_) = 1;
};

// The limit of a tenant's quota that refused a request.
enum class QuotaLimit { kNone, kRate, kConcurrency, kBytes };

// A tenant's limits, and how much the tenant uses now. When the limits change,
// the use stays. Held by shared_ptr, because a RequestPlace or ByteShare may
// outlive the tenant's entry in the file. Threads: its methods may be called
// from any thread.
class TenantQuota : public std::enable_shared_from_this<TenantQuota> {
 public:
  TenantQuota(const std::string& tenant, const kvasir::v1::Quota& limits);

  void SetLimits(const kvasir::v1::Quota& limits) ABSL_LOCKS_EXCLUDED(mutex_);

  // Call this for a new request, before any other work is done for it. If a
  // limit is exceeded, returns RESOURCE_EXHAUSTED and sets `*met` to this
  // limit. The error text names the tenant, the limit and, if it is known, the
  // time until the next try. A refused request uses nothing of the quota.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(absl::Time now,
                                                      QuotaLimit* met)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes the request's bytes from the quota. `outer` and the errors are the
  // same as for ByteBudget::Take.
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      size_t bytes, std::shared_ptr<ByteShare> outer) {
    return bytes_->Take(bytes, std::move(outer));
  }

  // Returns true if no request uses any of the quota.
  bool idle() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint32_t running() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class RequestPlace;
  absl::Status CountSamples(uint32_t n) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(uint32_t samples) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status IsFull(uint32_t most) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string tenant_;
  const std::shared_ptr<ByteBudget> bytes_;
  mutable base::Mutex mutex_;
  kvasir::v1::Quota limits_ ABSL_GUARDED_BY(mutex_);
  RequestRate rate_ ABSL_GUARDED_BY(mutex_);
  // The number of samples of all running requests.
  uint32_t running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::router
