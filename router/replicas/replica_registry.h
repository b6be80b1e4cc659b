// The replicas of a static list: connects, checks, watches their load, and
// tries again what was lost.
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
  // Names that clients use for the one model of all workers; empty: each
  // worker's own model_name.
  std::vector<std::string> served_names;
  // Of the facades' tokenizer; empty: any.
  std::string tokenizer_hash;
  absl::Duration info_timeout = absl::Seconds(5);
  absl::Duration load_interval = absl::Milliseconds(50);
  // What Start waits for the others behind the first worker's answer.
  absl::Duration others_patience = absl::Seconds(5);
  // After a replica's state has changed, from the transport's threads, no lock
  // held; never once Stop has returned. May be empty.
  std::function<void()> on_change;
};

using WorkerClientFactory =
    std::function<std::unique_ptr<WorkerClient>(const std::string& target)>;

// A replica and what the policy may know of it.
struct Candidate {
  std::shared_ptr<Replica> replica;
  ReplicaView view;
};

// Owns: the replicas and their clients.
// Threads: any thread.
class ReplicaRegistry {
 public:
  // `timers` and `observer` outlive it; `observer` may be null.
  ReplicaRegistry(ReplicaRegistryOptions options,
                  const WorkerClientFactory& new_client, TimerThread* timers,
                  ReplicaObserver* observer);
  ~ReplicaRegistry();

  // Connects to all. Returns once each has answered, or `patience` has passed,
  // or others_patience since the first answer: that one can serve.
  // FAILED_PRECONDITION, with the numbers, if one speaks another version or
  // serves other weights or another tokenizer; a worker that cannot be reached
  // is no error: it is tried again for ever.
  absl::Status Start(absl::Duration patience);
  // Resets all calls; returns when no callback will come any more. Idempotent.
  void Stop();

  // Replicas of the model, refused and lost ones too (not eligible then).
  // Empty: the name is unknown.
  std::vector<Candidate> Candidates(const std::string& model) const;
  std::vector<ModelStatus> Models() const;
  // One line for a person: what is not ready and why.
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
  void TellObserver(const Replica& replica) const;
  // The log, the observer, and who waits for changes.
  void TellState(const Replica& replica, ReplicaState before) const;
  static void Log(const Replica& replica, ReplicaState state);
  // Judges a worker against those in use, and counts it among them.
  absl::Status Admit(Replica* replica, const kvasir::v1::WorkerInfo& info)
      ABSL_LOCKS_EXCLUDED(admit_mutex_);
  std::vector<std::string> NamesOf(const Replica& replica) const;

  const ReplicaRegistryOptions options_;
  TimerThread* const timers_;
  ReplicaObserver* const observer_;
  std::vector<std::shared_ptr<Replica>> replicas_;
  const std::unique_ptr<FirstAnswers> first_answers_;
  // Its own resets are no news.
  std::atomic<bool> stopping_{false};
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();
  // Two workers are never judged at the same time: each would miss the other.
  // Taken before a replica's own.
  base::Mutex admit_mutex_;
};

}  // namespace kvasir::router
