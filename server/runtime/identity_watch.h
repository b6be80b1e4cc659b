// The file of --identities while a program runs: read at its start, and again
// when it changes.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "router/base/timer_thread.h"
#include "router/identity/callers.h"
#include "router/identity/metrics.h"
#include "server/flags/options.h"

namespace kvasir::cli {

// Outlives all that ask its callers.
// Owns: a thread that looks at the file every few seconds, where there is one.
// Threads: Start and the destructor from one.
class IdentityWatch {
 public:
  // The errors of router::Callers::Open for a file that is wrong, or that a
  // listener with these flags cannot go by.
  static absl::StatusOr<std::unique_ptr<IdentityWatch>> Start(
      const RouterFlags& router, const ListenFlags& listen);
  ~IdentityWatch();

  // Null: nobody is asked who he is.
  std::shared_ptr<const router::Callers> callers() const { return callers_; }
  // Zeros where there is no file.
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
