// How much a tenant may use: requests a second, concurrent requests, bytes.
// Threads: any thread, except RequestRate.
// No clock: callers pass the time of a clock that never steps.
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

// A token bucket. It stores the time at which it would be full, so that no
// rounding errors add up.
// Threads: one at a time.
class RequestRate {
 public:
  // `per_second` 0: no limit. `burst` must be at least 1.
  void SetLimit(double per_second, uint32_t burst);

  // Returns zero if the request is accepted. Otherwise returns after how long a
  // request would be, if no other comes in between.
  absl::Duration Take(absl::Time now);

 private:
  absl::Duration interval_ = absl::ZeroDuration();
  absl::Duration burst_ = absl::ZeroDuration();
  absl::Time full_at_ = absl::InfinitePast();
};

class TenantQuota;

// One request's place among a tenant's concurrent ones.
// Threads: any thread.
class RequestPlace {
 public:
  explicit RequestPlace(std::shared_ptr<TenantQuota> quota)
      : quota_(std::move(quota)) {}
  ~RequestPlace() { Leave(); }
  RequestPlace(const RequestPlace&) = delete;
  RequestPlace& operator=(const RequestPlace&) = delete;

  // The request has ended. Idempotent.
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  base::Mutex mutex_;
  std::shared_ptr<TenantQuota> quota_ ABSL_GUARDED_BY(mutex_);
};

// The limit of a tenant's quota that a request has met.
enum class QuotaLimit { kNone, kRate, kConcurrency, kBytes };

// One tenant's quota and use, through every change of its limits. Held by
// shared_ptr: places and shares may outlive the tenant.
// Threads: any thread.
class TenantQuota : public std::enable_shared_from_this<TenantQuota> {
 public:
  TenantQuota(const std::string& tenant, const kvasir::v1::Quota& limits);

  void SetLimits(const kvasir::v1::Quota& limits) ABSL_LOCKS_EXCLUDED(mutex_);

  // Called for a new request before anything else is done with it.
  // RESOURCE_EXHAUSTED, and `*met`, if a limit is met; the text names the
  // tenant, the limit, and when to try again, if that is known. A request that
  // one limit refuses uses nothing of the other.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(absl::Time now,
                                                      QuotaLimit* met)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes the request's bytes; `outer` and errors as in ByteBudget::Take.
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      size_t bytes, std::shared_ptr<ByteShare> outer) {
    return bytes_->Take(bytes, std::move(outer));
  }

  // True if no request holds any of it.
  bool idle() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint32_t running() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class RequestPlace;
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string tenant_;
  const std::shared_ptr<ByteBudget> bytes_;
  mutable base::Mutex mutex_;
  kvasir::v1::Quota limits_ ABSL_GUARDED_BY(mutex_);
  RequestRate rate_ ABSL_GUARDED_BY(mutex_);
  uint32_t running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::router
