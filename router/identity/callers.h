// The callers that this router accepts: the current file of --identities, and
// what its tenants use.
//
//   KVASIR_ASSIGN_OR_RETURN(auto callers, Callers::Open(options, &metrics));
//   KVASIR_ASSIGN_OR_RETURN(Caller caller, callers->Identify(shown, CLIENT));
//   KVASIR_ASSIGN_OR_RETURN(auto place, callers->Enter(caller));
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "router/base/byte_budget.h"
#include "router/identity/credentials.h"
#include "router/identity/identities.h"
#include "router/identity/quota.h"

namespace kvasir::router {

// Events that metrics count.
// Threads: any thread, several at once. Must not block.
class CallerObserver {
 public:
  virtual ~CallerObserver() = default;
  virtual void OnCallerRefused(CallerRefusal /*why*/) {}
  // The file has changed. `ok`: it is in use now; otherwise the previous one
  // stays. Called after the log line.
  virtual void OnIdentitiesRead(bool /*ok*/) {}
};

// The identity of a call's maker.
struct Caller {
  // Keeps caches, aborts and quotas apart. Empty: callers are not identified,
  // and this one named no tenant.
  std::string tenant;
  // The token's label, or the certificate's name, for the log.
  std::string label;
  // The tenant shares cached prefixes with all others that do.
  bool shared_prefix_cache = false;
  // The lowest priority number of its requests. Callers that are not identified
  // cannot overtake others.
  int32_t least_priority = 0;
  // Null: there are no quotas.
  std::shared_ptr<TenantQuota> quota;

  // The tenant with which it shares cached prefixes; empty: those of all
  // tenants that share.
  std::string cache_tenant() const { return shared_prefix_cache ? "" : tenant; }
};

// PERMISSION_DENIED if the caller's requests may not have this priority.
absl::Status CheckPriority(const Caller& caller, int32_t priority);

// Threads: any thread.
class Callers {
 public:
  // Returns the file's bytes, or an error. Called from one thread at a time.
  using ReadFile = std::function<absl::StatusOr<std::string>()>;
  struct Options {
    // The file's name in texts.
    std::string name;
    ReadFile read;
    ListenerProof proof;
    // For quotas.
    const base::Clock* clock = &base::Clock::Real();
    // The wall clock, for the ends of tokens.
    std::function<absl::Time()> now = [] { return absl::Now(); };
  };

  // Returns the errors of `read`, Identities::Parse and CheckListener.
  // `observer` may be null and must outlive it.
  static absl::StatusOr<std::shared_ptr<Callers>> Open(
      Options options, CallerObserver* observer);

  // Reads the file again. A file that cannot be read or parsed changes nothing;
  // it is logged and counted once. Any other file is used, even if
  // CheckListener would refuse it at a start, which is logged: a removed caller
  // must lose its access, even the last one. From one thread at a time.
  void Poll() ABSL_LOCKS_EXCLUDED(mutex_);

  // Identifies a caller that needs `role`. `tenant` is the tenant that the
  // caller names (metadata x-tenant-id; may be empty). Errors: UNAUTHENTICATED;
  // PERMISSION_DENIED (role, or a tenant that the caller may not name);
  // INVALID_ARGUMENT (not a tenant's name). If a gateway names a tenant that is
  // not listed, the gateway's quota applies, and the tenant shares no cached
  // prefixes.
  //
  // Refusals are counted, and their statuses have a reason
  // (router/base/refusal_reason.h). `refused` (may be null) then receives the
  // tenant and label, as far as they are known, for the log.
  absl::StatusOr<Caller> Identify(const Credentials& credentials,
                                  kvasir::v1::Role role,
                                  const std::string& tenant = "",
                                  Caller* refused = nullptr) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // As in TenantQuota, for an identified caller. Refusals are counted, and have
  // a reason.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(
      const Caller& caller) const;
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      const Caller& caller, size_t bytes,
      std::shared_ptr<ByteShare> outer) const;

 private:
  struct Snapshot {
    Identities identities;
    // By the tenant's index; the last one is for anonymous callers, if they are
    // allowed.
    std::vector<std::shared_ptr<TenantQuota>> quotas;
  };

  Callers(Options options, CallerObserver* observer)
      : options_(std::move(options)), observer_(observer) {}
  void Take(Identities identities) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts the refusal and adds the reason to `status`.
  absl::Status Refused(CallerRefusal why, absl::Status status) const;

  const Options options_;
  CallerObserver* const observer_;
  // The last contents seen, used or not. Only the polling thread uses it.
  std::string seen_;

  mutable base::Mutex mutex_;
  std::shared_ptr<const Snapshot> now_ ABSL_GUARDED_BY(mutex_);
  // Tenants that were removed while their requests ran stay until those have
  // ended.
  std::map<std::string, std::shared_ptr<TenantQuota>> quotas_
      ABSL_GUARDED_BY(mutex_);
};

// Reads at most kMaxIdentitiesBytes. Returns the errors of base::ReadFile with
// the path.
absl::StatusOr<std::string> ReadIdentitiesFile(const std::string& path);

}  // namespace kvasir::router
