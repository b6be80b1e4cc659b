// Who may call this router: the file of --identities as it is now, and what
// its tenants use.
//
//   KVASIR_ASSIGN_OR_RETURN(auto callers, Callers::Open(options, &metrics));
//   KVASIR_ASSIGN_OR_RETURN(Caller caller, callers->Identify(shown, CLIENT));
//   KVASIR_ASSIGN_OR_RETURN(auto place, callers->Enter(caller));
#pragma once

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

// Where its metrics are bound.
// Threads: any thread, several at once. Must not block.
class CallerObserver {
 public:
  virtual ~CallerObserver() = default;
  virtual void OnCallerRefused(CallerRefusal /*why*/) {}
  // The file has changed, and was taken; or not: those from before stay. Its
  // line is written.
  virtual void OnIdentitiesRead(bool /*ok*/) {}
};

// Who makes a call.
struct Caller {
  // Keeps caches, aborts and quotas apart. Empty: nobody is asked who he is,
  // and nobody said.
  std::string tenant;
  // Of the token, or the certificate's name: for the log.
  std::string label;
  // It shares cached prefixes with others who do.
  bool shared_prefix_cache = false;
  // Null: nobody has any.
  std::shared_ptr<TenantQuota> quota;

  // Who shares cached prefixes with him; empty: all who are of no other.
  std::string cache_tenant() const { return shared_prefix_cache ? "" : tenant; }
};

// Threads: any thread.
class Callers {
 public:
  // The file's bytes, or why there are none. From one thread at a time.
  using ReadFile = std::function<absl::StatusOr<std::string>()>;
  struct Options {
    // What the file is called in texts.
    std::string name;
    ReadFile read;
    ListenerProof proof;
    // Of quotas.
    const base::Clock* clock = &base::Clock::Real();
    // Of the ends of tokens: the world's time, not a steady one.
    std::function<absl::Time()> now = [] { return absl::Now(); };
  };

  // The errors of `read`, Identities::Parse and CheckListener. `observer` may
  // be null, and lives as long.
  static absl::StatusOr<std::shared_ptr<Callers>> Open(
      Options options, CallerObserver* observer);

  // Reads the file again. One that cannot be read or parsed changes nothing; it
  // is logged and counted once. Any other is taken, also where no start would
  // (CheckListener), which is logged: who is taken out must be out, even if he
  // was the last. From one thread at a time.
  void Poll() ABSL_LOCKS_EXCLUDED(mutex_);

  // Who it is, of those who have `role`; `tenant` is what he says of himself
  // (metadata x-tenant-id, may be empty). UNAUTHENTICATED, PERMISSION_DENIED
  // (role, or a tenant that he may not name), INVALID_ARGUMENT (a tenant that
  // is no name). A tenant that he may name and that is not listed
  // has his quota, and shares cached prefixes with nobody.
  //
  // Refusals are counted, and their statuses have a reason
  // (router/base/refusal_reason.h). `refused` (may be null) is then who it is
  // as far as he is known, for the log: tenant and label.
  absl::StatusOr<Caller> Identify(const Credentials& credentials,
                                  kvasir::v1::Role role,
                                  const std::string& tenant = "",
                                  Caller* refused = nullptr) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // TenantQuota's, of a caller who was identified; refusals are counted, and
  // have a reason.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(
      const Caller& caller) const;
  absl::StatusOr<std::shared_ptr<ByteShare>> TakeBytes(
      const Caller& caller, size_t bytes,
      std::shared_ptr<ByteShare> outer) const;

 private:
  struct Snapshot {
    Identities identities;
    // By index; the last is anonymous', if there is one.
    std::vector<std::shared_ptr<TenantQuota>> quotas;
  };

  Callers(Options options, CallerObserver* observer)
      : options_(std::move(options)), observer_(observer) {}
  void Take(Identities identities) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts it; `status` with its reason.
  absl::Status Refused(CallerRefusal why, absl::Status status) const;

  const Options options_;
  CallerObserver* const observer_;
  // The last that was seen, taken or not; of the thread that polls.
  std::string seen_;

  mutable base::Mutex mutex_;
  std::shared_ptr<const Snapshot> now_ ABSL_GUARDED_BY(mutex_);
  // Those who went while requests of theirs ran stay until they have ended.
  std::map<std::string, std::shared_ptr<TenantQuota>> quotas_
      ABSL_GUARDED_BY(mutex_);
};

// At most kMaxIdentitiesBytes; the errors of base::ReadFile with the path.
absl::StatusOr<std::string> ReadIdentitiesFile(const std::string& path);

}  // namespace kvasir::router
