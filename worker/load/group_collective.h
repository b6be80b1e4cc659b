// Connects a rank's group and holds its Collective, so that any thread can
// abort the group at any time.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "worker/collective/collective.h"
#include "worker/load/collective_group.h"

namespace kvasir::cli {

// The collective of a group that may be aborted at any time, also before or
// while it connects.
//
// Threads: its methods may be called from any thread.
class GroupCollective {
 public:
  // Sets the group to connect. Call it once, before Connect.
  void Begin(std::unique_ptr<CollectiveGroup> joining)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Connects the group. If the group has been aborted, returns the reason, and
  // get() stays null.
  absl::Status Connect(absl::Span<const std::string> addresses)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Abort(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Null before Connect and after Reset.
  worker::Collective* get() const ABSL_LOCKS_EXCLUDED(mutex_);
  void Reset() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable base::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<CollectiveGroup> joining_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<worker::Collective> collective_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
