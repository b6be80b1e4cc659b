// How much a tenant may use: requests a second, requests at a time, bytes.
// Threads: any thread, but for RequestRate. No clock: callers say what time it
// is, of a clock that never steps.
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

// A token bucket, kept as the time at which it would be full: no rounding adds
// up, however long it runs.
// Threads: one at a time.
class RequestRate {
 public:
  // `per_second` 0: no limit. `burst` is 1 at least.
  void SetLimit(double per_second, uint32_t burst);

  // Zero: the request is taken. Otherwise it is not, and one that comes after
  // so long would be, if nobody else is in between.
  absl::Duration Take(absl::Time now);

 private:
  absl::Duration interval_ = absl::ZeroDuration();
  absl::Duration burst_ = absl::ZeroDuration();
  absl::Time full_at_ = absl::InfinitePast();
};

class TenantQuota;

// The place of one request among those that run at a time.
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

// Which of a tenant's limits a request has met.
enum class QuotaLimit { kNone, kRate, kConcurrency, kBytes };

// One tenant's, through every change of its limits. Held by shared_ptr: places
// and shares may outlive the tenant.
// Threads: any thread.
class TenantQuota : public std::enable_shared_from_this<TenantQuota> {
 public:
  TenantQuota(const std::string& tenant, const kvasir::v1::Quota& limits);

  void SetLimits(const kvasir::v1::Quota& limits) ABSL_LOCKS_EXCLUDED(mutex_);

  // For a request that has come, before anything else is done with it:
  // RESOURCE_EXHAUSTED, and `*met`, where a limit is met. The text names
  // tenant, limit, and when to come back where that is known. A request that is
  // refused for one limit has taken nothing of the other.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(absl::Time now,
                                                      QuotaLimit* met)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // For its bytes; `outer` as ByteBudget::Take has it. The errors of that.
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      size_t bytes, std::shared_ptr<ByteShare> outer) {
    return bytes_->Take(bytes, std::move(outer));
  }

  // Nothing of it is held by a request.
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
