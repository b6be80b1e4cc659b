// Reads the file of --identities at the start, and again when it changes.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "router/base/timer_thread.h"
#include "router/identity/callers.h"
#include "router/identity/metrics.h"
#include "server/flags/options.h"

namespace kvasir::cli {

// Must outlive all users of callers().
// Owns: a thread that checks the file every few seconds, if there is a file.
// Threads: one thread calls Start and the destructor.
class IdentityWatch {
 public:
  // Returns the errors of router::Callers::Open if the file is invalid, or if
  // its callers could not be accepted with the flags in `listen`.
  static absl::StatusOr<std::unique_ptr<IdentityWatch>> Start(
      const RouterFlags& router, const ListenFlags& listen);
  ~IdentityWatch();

  // If null, callers need no credentials.
  std::shared_ptr<const router::Callers> callers() const { return callers_; }
  // The metrics about the file and its callers. All are 0 if there is no file.
  std::shared_ptr<prometheus::Collectable> metrics() const {
    return metrics_.registry();
  }

 private:
  IdentityWatch() = default;
  void PollLater();

  router::CallerMetrics metrics_;
  std::shared_ptr<router::Callers> callers_;
  std::unique_ptr<router::TimerThread> timers_;
};

}  // namespace kvasir::cli
