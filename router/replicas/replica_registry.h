// The replicas of a static list: connects to them, checks them, watches their
// load, and reconnects to lost ones.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "router/base/callback_gate.h"
#include "router/base/canonical.h"
#include "router/base/timer_thread.h"
#include "router/replicas/replica.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

struct ReplicaRegistryOptions {
  // "host:port" or "unix:/path".
  std::vector<std::string> targets;
  // The names that clients use for the one model of all workers; empty: each
  // worker's own model_name.
  std::vector<std::string> served_names;
  // The facades' tokenizer; empty: any.
  std::string tokenizer_hash;
  absl::Duration info_timeout = absl::Seconds(5);
  absl::Duration load_interval = absl::Milliseconds(50);
  // How long Start waits for further workers after the first one has answered.
  absl::Duration others_patience = absl::Seconds(5);
  // Called after a replica's state has changed, on the transport's threads and
  // without a lock; never after Stop has returned. May be empty.
  std::function<void()> on_change;
};

using WorkerClientFactory =
    std::function<std::unique_ptr<WorkerClient>(const std::string& target)>;

// A replica, and what the policy may know about it.
struct Candidate {
  std::shared_ptr<Replica> replica;
  ReplicaView view;
};

// Owns: the replicas and their clients.
// Threads: any thread.
class ReplicaRegistry {
 public:
  // `timers` and `observer` must outlive it; `observer` may be null.
  ReplicaRegistry(ReplicaRegistryOptions options,
                  const WorkerClientFactory& new_client, TimerThread* timers,
                  ReplicaObserver* observer);
  ~ReplicaRegistry();

  // Connects to all workers. Returns once each has answered, or `patience` has
  // passed, or others_patience has passed since the first answer.
  // FAILED_PRECONDITION, with the values, if a worker has another version,
  // other weights or another tokenizer. A worker that cannot be reached is no
  // error: the registry tries again for ever.
  absl::Status Start(absl::Duration patience);
  // Resets all calls, and returns when no callback will come any more.
  // Idempotent.
  void Stop();

  // Replicas of the model, including refused and lost ones (which are not
  // eligible). Empty: the name is unknown.
  std::vector<Candidate> Candidates(const std::string& model) const;
  std::vector<ModelStatus> Models() const;
  // One line for people: which replicas are not ready, and why.
  std::string Problems() const;
  const std::vector<std::shared_ptr<Replica>>& replicas() const {
    return replicas_;
  }

 private:
  struct FirstAnswers;
  class Watch;

  void Connect(const std::shared_ptr<Replica>& replica);
  void OnInfo(const std::shared_ptr<Replica>& replica,
              absl::StatusOr<kvasir::v1::WorkerInfo> info);
  void OnWatchEnded(const std::shared_ptr<Replica>& replica,
                    const absl::Status& status);
  void Retry(const std::shared_ptr<Replica>& replica, absl::Duration after);
  void NotifyObserver(const Replica& replica) const;
  // Logs a new state, and reports it to the observer and on_change.
  void ReportState(const Replica& replica, ReplicaState before) const;
  static void Log(const Replica& replica, ReplicaState state);
  // Checks a worker against those in use, and counts it among them.
  absl::Status Admit(Replica* replica, const kvasir::v1::WorkerInfo& info)
      ABSL_LOCKS_EXCLUDED(admit_mutex_);
  std::vector<std::string> NamesOf(const Replica& replica) const;

  const ReplicaRegistryOptions options_;
  TimerThread* const timers_;
  ReplicaObserver* const observer_;
  std::vector<std::shared_ptr<Replica>> replicas_;
  const std::unique_ptr<FirstAnswers> first_answers_;
  // Resets by Stop are not reported as lost workers.
  std::atomic<bool> stopping_{false};
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();
  // Workers are checked one at a time: two at once would not see each other.
  // Locked before a replica's own mutex.
  base::Mutex admit_mutex_;
};

}  // namespace kvasir::router
