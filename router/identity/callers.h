// The callers that this router accepts, and how much of its quota each tenant
// uses. The callers come from the file of --identities, which is read again
// when it changes.
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

// Receives the events that metrics count.
// Threads: several threads may call methods at once. A call must not block.
class CallerObserver {
 public:
  virtual ~CallerObserver() = default;
  virtual void OnCallerRefused(CallerRefusal /*why*/) {}
  // Called after a change of the file was logged. If `ok`, the new contents are
  // in use, otherwise still the previous ones.
  virtual void OnIdentitiesRead(bool /*ok*/) {}
};

// The identity of the caller that made a call.
struct Caller {
  // The tenant to which the caller belongs. Each tenant has its own quota and
  // its own cached prefixes (unless shared_prefix_cache), and can abort only
  // its own requests. Empty if the router does not identify callers and the
  // caller names no tenant.
  std::string tenant;
  // The token's label or the certificate's name, for the log.
  std::string label;
  // If true, the tenant shares cached prefixes with all other tenants for which
  // this is true.
  bool shared_prefix_cache = false;
  // The lowest priority number that the caller's requests may have. Requests
  // with lower numbers run first. Requests have priority 0 by default, so with
  // 0 here the caller cannot overtake ordinary requests.
  int32_t least_priority = 0;
  // The tenant's quota; null if there are no quotas.
  std::shared_ptr<TenantQuota> quota;

  // The name that separates the tenant's cached prefixes from others
  // (CacheSaltOf); empty if the tenant shares its prefixes.
  std::string cache_tenant() const { return shared_prefix_cache ? "" : tenant; }
};

// Returns PERMISSION_DENIED if `priority` is below the caller's least_priority.
absl::Status CheckPriority(const Caller& caller, int32_t priority);

// Identifies callers, and counts what their tenants use.
// Threads: its methods may be called from any thread.
class Callers {
 public:
  // A function that returns the file's bytes, or an error. Called from one
  // thread at a time.
  using ReadFile = std::function<absl::StatusOr<std::string>()>;
  struct Options {
    // The file's name in errors and log lines.
    std::string name;
    ReadFile read;
    ListenerProof proof;
    // The clock for quotas.
    const base::Clock* clock = &base::Clock::Real();
    // The wall clock, by which tokens expire.
    std::function<absl::Time()> now = [] { return absl::Now(); };
  };

  // Reads the file for the first time. Returns the errors of `read`,
  // Identities::Parse and CheckListener. `observer` must outlive the result; it
  // may be null.
  static absl::StatusOr<std::shared_ptr<Callers>> Open(
      Options options, CallerObserver* observer);

  // Reads the file again. If it cannot be read or parsed, the previous contents
  // stay in use, and this is logged and counted once. New contents are used
  // even if CheckListener refuses them, because a removed caller must always
  // lose its access. Call this from one thread at a time.
  void Poll() ABSL_LOCKS_EXCLUDED(mutex_);

  // Identifies a caller and checks that it has `role`. `tenant` is the tenant
  // that the caller names (metadata x-tenant-id; may be empty). Errors:
  // UNAUTHENTICATED; PERMISSION_DENIED (the role is missing, or the caller may
  // not name this tenant); INVALID_ARGUMENT (not a valid tenant name). If a
  // gateway names a tenant that is not in the file, the gateway's quota
  // applies, and the tenant shares no cached prefixes. A refusal is counted,
  // and its status has a reason (router/base/refusal_reason.h). If `refused`
  // is not null, it receives the tenant and the label if they are known, for
  // the log.
  absl::StatusOr<Caller> Identify(const Credentials& credentials,
                                  kvasir::v1::Role role,
                                  const std::string& tenant = "",
                                  Caller* refused = nullptr) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // These two call the TenantQuota method of the same name. A refusal is
  // counted, and its status has a reason.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(
      const Caller& caller) const;
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      const Caller& caller, size_t bytes,
      std::shared_ptr<ByteShare> outer) const;
  // Calls RequestPlace::CountSamples. A refusal is counted, and its status has
  // a reason.
  absl::Status CountSamples(RequestPlace* place, uint32_t n) const;

 private:
  struct Snapshot {
    Identities identities;
    // The quota of each tenant, by its index. If anonymous callers are allowed,
    // the last quota is theirs.
    std::vector<std::shared_ptr<TenantQuota>> quotas;
  };

  Callers(Options options, CallerObserver* observer)
      : options_(std::move(options)), observer_(observer) {}
  void Take(Identities identities) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts the refusal and returns `status` with the reason added.
  absl::Status Refused(CallerRefusal why, absl::Status status) const;

  const Options options_;
  CallerObserver* const observer_;
  // The file's text at the last read, or the read's error. Used only by the
  // thread that polls.
  std::string seen_;

  mutable base::Mutex mutex_;
  std::shared_ptr<const Snapshot> now_ ABSL_GUARDED_BY(mutex_);
  // The quota of each tenant, by name. If a tenant is removed from the file,
  // its quota stays until its requests have ended.
  std::map<std::string, std::shared_ptr<TenantQuota>> quotas_
      ABSL_GUARDED_BY(mutex_);
};

// Reads the file, at most kMaxIdentitiesBytes. Returns the errors of
// base::ReadFile, with the path added.
absl::StatusOr<std::string> ReadIdentitiesFile(const std::string& path);

}  // namespace kvasir::router
