// Manages the replicas of a list of workers, which may change while the router
// runs: connects to them, checks them, watches their load, and reconnects to
// lost ones.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
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
  // The workers that are known at the start. SetWorkers changes the list.
  std::vector<WorkerAddress> workers;
  // True if a worker that fails its checks makes Start fail. Otherwise it is
  // only left out.
  bool refusal_fails_start = true;
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
    std::function<std::unique_ptr<WorkerClient>(const WorkerAddress&)>;

// A list of replicas that never changes. The registry replaces its list by
// another one when workers are added or removed. Copies share the list, and
// keep its replicas alive.
class ReplicaList {
 public:
  using Replicas = std::vector<std::shared_ptr<Replica>>;

  explicit ReplicaList(Replicas replicas = {})
      : replicas_(std::make_shared<const Replicas>(std::move(replicas))) {}

  Replicas::const_iterator begin() const { return replicas_->begin(); }
  Replicas::const_iterator end() const { return replicas_->end(); }
  size_t size() const { return replicas_->size(); }
  bool empty() const { return replicas_->empty(); }
  const std::shared_ptr<Replica>& operator[](size_t i) const {
    return (*replicas_)[i];
  }
  bool Contains(const Replica& replica) const;

 private:
  std::shared_ptr<const Replicas> replicas_;
};

// A replica, with its data for the policy.
struct Candidate {
  const std::shared_ptr<Replica>& replica;  // in the CandidateList's list
  ReplicaView view;
};

// The replicas of a model.
// Threads: only one thread at a time may use it.
class CandidateList {
 public:
  explicit CandidateList(ReplicaList replicas)
      : replicas_(std::move(replicas)) {}

  // `replica` must be an element of the list.
  void Add(const std::shared_ptr<Replica>& replica) {
    candidates_.push_back({replica, replica->view()});
  }
  std::vector<Candidate>::iterator begin() { return candidates_.begin(); }
  std::vector<Candidate>::iterator end() { return candidates_.end(); }
  std::vector<Candidate>::const_iterator begin() const {
    return candidates_.begin();
  }
  std::vector<Candidate>::const_iterator end() const {
    return candidates_.end();
  }
  bool empty() const { return candidates_.empty(); }
  const Candidate& operator[](size_t i) const { return candidates_[i]; }

 private:
  ReplicaList replicas_;
  std::vector<Candidate> candidates_;
};

// All replicas of the router.
// Owns: the replicas and their clients. A request shares ownership of its
//   replica. So if the worker is removed, the replica and its client live until
//   the last request at it has ended.
// Threads: its methods may be called from any thread.
class ReplicaRegistry {
 public:
  // `timers` and `observer` must outlive the registry; `observer` may be null.
  ReplicaRegistry(ReplicaRegistryOptions options,
                  WorkerClientFactory new_client, TimerThread* timers,
                  ReplicaObserver* observer);
  ~ReplicaRegistry();

  // Connects to all workers. Returns when every worker has answered (at least
  // one), when `patience` has passed, or when others_patience has passed since
  // the first answer. A worker that cannot be reached is no error, because the
  // registry keeps trying. If refusal_fails_start is set, returns
  // FAILED_PRECONDITION if a worker fails its checks (CheckWorker); the text
  // contains the values.
  absl::Status Start(absl::Duration patience)
      ABSL_LOCKS_EXCLUDED(change_mutex_);
  // Replaces the list of workers. Addresses that occur twice count once. A
  // removed worker gets no new requests; requests at it go on. `problems` is a
  // text for people that says what the list may lack.
  void SetWorkers(const std::vector<WorkerAddress>& workers,
                  std::string problems = "")
      ABSL_LOCKS_EXCLUDED(change_mutex_, list_mutex_, observer_mutex_);
  // Returns whether a worker is in the list and connected.
  bool IsConnected(const std::string& target) const;
  // Resets all calls to workers. After Stop has returned, no callback runs.
  // Stop may be called again.
  void Stop() ABSL_LOCKS_EXCLUDED(change_mutex_);
  // Call this regularly with the time that has passed (RunningTime), so that
  // replicas that hang are found. Returns true if one of them hangs, removed
  // ones included.
  bool Tick(absl::Duration elapsed) ABSL_LOCKS_EXCLUDED(change_mutex_);
  // Sets a function that is called right after every call of on_change. It
  // replaces the previous function.
  void SetListener(std::function<void()> listener)
      ABSL_LOCKS_EXCLUDED(listener_mutex_);

  // Returns the replicas of the model, including refused and lost ones (which
  // are not eligible). The list is empty if the name is unknown.
  CandidateList Candidates(const std::string& model) const;
  // If no replica is known, returns the models of the last one that was
  // removed, so that their requests wait for the next one.
  std::vector<ModelStatus> Models() const ABSL_LOCKS_EXCLUDED(list_mutex_);
  // Returns a line of text for people, which names the replicas that are not
  // ready and the causes.
  std::string Problems() const ABSL_LOCKS_EXCLUDED(list_mutex_);
  ReplicaList replicas() const ABSL_LOCKS_EXCLUDED(list_mutex_) {
    base::MutexLock lock(&list_mutex_);
    return replicas_;
  }

 private:
  struct FirstAnswers;
  class Watch;

  void Connect(const std::shared_ptr<Replica>& replica);
  void OnInfo(const std::shared_ptr<Replica>& replica,
              absl::StatusOr<kvasir::v1::WorkerInfo> info);
  // `replica` is null if it has been destroyed.
  void OnWatchEnded(const std::shared_ptr<Replica>& replica,
                    const absl::Status& status);
  void Retry(const std::shared_ptr<Replica>& replica, absl::Duration after);
  // Reports the replica's state to the observer, unless it has been removed.
  void NotifyObserver(const Replica& replica) const
      ABSL_LOCKS_EXCLUDED(observer_mutex_);
  // Calls on_change and the listener.
  void NotifyListeners() const ABSL_LOCKS_EXCLUDED(listener_mutex_);
  void Swap(ReplicaList::Replicas kept, const ReplicaList::Replicas& added,
            const ReplicaList::Replicas& removed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mutex_);
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
  bool Serves(const Replica& replica, const std::string& model) const;

  const ReplicaRegistryOptions options_;
  const WorkerClientFactory new_client_;
  TimerThread* const timers_;
  ReplicaObserver* const observer_;
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
  // Held while the observer is called, so that it learns of no state of a
  // replica after its removal. Lock it before list_mutex_.
  mutable base::Mutex observer_mutex_;
  // Held during a change of the list. Lock it before the mutexes above and
  // below.
  base::Mutex change_mutex_;
  bool started_ ABSL_GUARDED_BY(change_mutex_) = false;
  // The removed replicas that may still have requests.
  std::vector<std::weak_ptr<Replica>> leaving_ ABSL_GUARDED_BY(change_mutex_);
  mutable base::Mutex list_mutex_;
  ReplicaList replicas_ ABSL_GUARDED_BY(list_mutex_);
  std::string list_problems_ ABSL_GUARDED_BY(list_mutex_);
  // The properties of the last removed replica that had been reached.
  std::optional<kvasir::v1::WorkerInfo> last_info_ ABSL_GUARDED_BY(list_mutex_);
};

}  // namespace kvasir::router
