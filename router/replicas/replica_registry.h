// Manages the replicas of a fixed list of workers: connects to them, checks
// them, watches their load, and reconnects to lost ones.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
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
  // The addresses of the workers: "host:port" or "unix:/path".
  std::vector<std::string> targets;
  // The names that clients use for the model, if all workers serve the same
  // model. If empty, clients use each worker's own model_name.
  std::vector<std::string> served_names;
  // The hash of the router's tokenizer. If empty, workers may have
  // any tokenizer.
  std::string tokenizer_hash;
  absl::Duration info_timeout = absl::Seconds(5);
  absl::Duration load_interval = absl::Milliseconds(50);
  // The longest time that Start waits for the other workers after the
  // first answer.
  absl::Duration others_patience = absl::Seconds(5);
  // Called after a replica's state has changed, on a thread of the transport
  // that holds no lock. Never called after Stop has returned. May be empty.
  std::function<void()> on_change;
};

using WorkerClientFactory =
    std::function<std::unique_ptr<WorkerClient>(const std::string& target)>;

// A replica, with its data for the policy.
struct Candidate {
  std::shared_ptr<Replica> replica;
  ReplicaView view;
};

// All replicas of the router.
// Owns: the replicas and their clients.
// Threads: its methods may be called from any thread.
class ReplicaRegistry {
 public:
  // `timers` and `observer` must outlive the registry; `observer` may be null.
  ReplicaRegistry(ReplicaRegistryOptions options,
                  const WorkerClientFactory& new_client, TimerThread* timers,
                  ReplicaObserver* observer);
  ~ReplicaRegistry();

  // Connects to all workers. Returns when every worker has answered, when
  // `patience` has passed, or when others_patience has passed since the first
  // answer. Returns FAILED_PRECONDITION if a worker fails its checks
  // (CheckWorker); the text contains the values. A worker that cannot be
  // reached is no error, because the registry keeps trying.
  absl::Status Start(absl::Duration patience);
  // Resets all calls to workers. After Stop has returned, no callback runs.
  // Stop may be called again.
  void Stop();
  // Call this regularly with the time that has passed (RunningTime), so that
  // replicas that hang are found.
  void Tick(absl::Duration elapsed);
  // Sets a function that is called right after every call of on_change. It
  // replaces the previous function.
  void SetListener(std::function<void()> listener)
      ABSL_LOCKS_EXCLUDED(listener_mutex_);

  // Returns the replicas of the model, including refused and lost ones (which
  // are not eligible). The list is empty if the name is unknown.
  std::vector<Candidate> Candidates(const std::string& model) const;
  std::vector<ModelStatus> Models() const;
  // Returns a line of text for people, which names the replicas that are not
  // ready and the causes.
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
  // Reports the replica's state to the observer and to on_change, and logs it
  // if it differs from `before`.
  void ReportState(const Replica& replica, ReplicaState before) const
      ABSL_LOCKS_EXCLUDED(listener_mutex_);
  static void Log(const Replica& replica, ReplicaState state);
  // Checks that a worker agrees with the replicas in use. If so, marks the
  // worker as in use.
  absl::Status Admit(Replica* replica, const kvasir::v1::WorkerInfo& info)
      ABSL_LOCKS_EXCLUDED(admit_mutex_);
  std::vector<std::string> NamesOf(const Replica& replica) const;

  const ReplicaRegistryOptions options_;
  TimerThread* const timers_;
  ReplicaObserver* const observer_;
  std::vector<std::shared_ptr<Replica>> replicas_;
  const std::unique_ptr<FirstAnswers> first_answers_;
  // True after Stop has begun. Stop resets all calls. So when a call ends
  // later, the worker does not count as lost.
  std::atomic<bool> stopping_{false};
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();
  // Held while a worker is checked, because two workers that are checked at
  // the same time must be compared with each other. Lock it before a replica's
  // own mutex.
  base::Mutex admit_mutex_;
  mutable base::Mutex listener_mutex_;
  std::function<void()> listener_ ABSL_GUARDED_BY(listener_mutex_);
};

}  // namespace kvasir::router
