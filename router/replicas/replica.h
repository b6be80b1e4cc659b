// The router's view of a replica: its state, its last load report, and the
// requests that the router has sent since then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "router/policy/policy.h"
#include "router/replicas/liveness.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

inline constexpr char kApiVersion[] = "kvasir.v1";

enum class ReplicaState {
  kConnecting,  // the worker has not been reached yet
  kReady,
  kDraining,
  kHung,     // the worker is connected, but does not work (Liveness)
  kLost,     // the connection is lost; the router tries to connect again
  kRefused,  // the worker has failed its checks (CheckWorker)
};
const char* ReplicaStateName(ReplicaState state);

// Receives changes of replicas' states.
// Threads: several threads may call methods at once. A call must not block.
class ReplicaObserver {
 public:
  virtual ~ReplicaObserver() = default;
  virtual void OnReplicaState(const std::string& /*target*/,
                              ReplicaState /*state*/) {}
  // The worker is no longer in the router's list.
  virtual void OnReplicaRemoved(const std::string& /*target*/) {}
};

// The properties that a worker must have.
struct Expected {
  // The hash of the router's tokenizer. If empty, the worker may have
  // any tokenizer.
  std::string tokenizer_hash;
  // The properties of a replica of the same model that is in use. The worker
  // must have the same. Absent if no replica is in use.
  std::optional<kvasir::v1::WorkerInfo> peer;
};

// Returns FAILED_PRECONDITION if the worker does not have the expected
// properties. The text names the worker, the value that it has and the value
// that is expected.
absl::Status CheckWorker(const std::string& target,
                         const kvasir::v1::WorkerInfo& info,
                         const Expected& expected);

// The router's view of one worker.
// Owns: the client.
// Threads: its methods may be called from any thread.
class Replica {
 public:
  Replica(std::string target, std::unique_ptr<WorkerClient> client)
      : target_(std::move(target)),
        name_(StableHash(target_)),
        client_(std::move(client)) {}

  const std::string& target() const { return target_; }
  WorkerClient* client() const { return client_.get(); }

  // Call one of these after an attempt to connect: OnInfo if the worker has
  // passed its checks, OnRefused if it has failed them, OnLost if it could not
  // be reached. OnRefused and OnLost return the time until the next attempt.
  void OnInfo(const kvasir::v1::WorkerInfo& info) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration OnRefused(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration OnLost(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Call this for each load report. The first report makes the replica ready.
  void OnReport(const kvasir::v1::LoadReport& report)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Call this regularly with the time that has passed (RunningTime). It marks a
  // ready or draining replica as hung. The next report takes the mark back.
  void OnTick(absl::Duration elapsed) ABSL_LOCKS_EXCLUDED(mutex_);

  ReplicaState state() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns whether and how the worker hangs.
  Liveness::State liveness() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the number of the connection to the worker
  // (ReplicaView.incarnation).
  uint64_t connection() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns true if the worker has passed its checks and is not lost. New
  // replicas of a model must agree with those in use.
  bool in_use() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns a text about the last problem; empty if there is none.
  std::string detail() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<kvasir::v1::WorkerInfo> info() const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns info()->model_name(), without copying the rest.
  std::optional<std::string> model_name() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the data for the policy. `eligible` is true if the replica is
  // ready. The caller must set it to false if it has already sent the request
  // to this replica. `max_num_seqs` is the number of open seats.
  ReplicaView view() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the number of requests that were sent to the replica and have
  // not ended.
  uint32_t in_flight() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class ReplicaLease;
  void OnSent(uint64_t prompt_tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns the number of the last report.
  uint64_t OnAccepted(uint64_t prompt_tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  // `accepted_after` is what OnAccepted returned; absent: not accepted.
  void OnEnded(uint64_t prompt_tokens, std::optional<uint64_t> accepted_after)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration NextBackoff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the state of a worker that is connected and has sent report_.
  ReplicaState StateOfReport() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string target_;
  const uint64_t name_;
  const std::unique_ptr<WorkerClient> client_;

  mutable base::Mutex mutex_;
  ReplicaState state_ ABSL_GUARDED_BY(mutex_) = ReplicaState::kConnecting;
  std::string detail_ ABSL_GUARDED_BY(mutex_);
  std::optional<kvasir::v1::WorkerInfo> info_ ABSL_GUARDED_BY(mutex_);
  // The number of this connection, which no other connection of the router
  // has; 0 before the first one.
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  kvasir::v1::LoadReport report_ ABSL_GUARDED_BY(mutex_);
  Liveness liveness_ ABSL_GUARDED_BY(mutex_);
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  // How many requests were sent and have not been accepted by the worker yet.
  uint32_t unaccepted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t unaccepted_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t reports_ ABSL_GUARDED_BY(mutex_) = 0;
  // How many running requests the worker has accepted after its last report.
  uint32_t fresh_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t fresh_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
};

// As long as this object exists, one request counts in the replica's load.
// Threads: only one thread at a time may use it.
class ReplicaLease {
 public:
  ReplicaLease(std::shared_ptr<Replica> replica, uint64_t prompt_tokens)
      : replica_(std::move(replica)), prompt_tokens_(prompt_tokens) {
    replica_->OnSent(prompt_tokens_);
  }
  ~ReplicaLease() { replica_->OnEnded(prompt_tokens_, accepted_after_); }
  ReplicaLease(const ReplicaLease&) = delete;
  ReplicaLease& operator=(const ReplicaLease&) = delete;

  const Replica& replica() const { return *replica_; }

  void OnAccepted() {
    if (!accepted_after_.has_value()) {
      accepted_after_ = replica_->OnAccepted(prompt_tokens_);
    }
  }

 private:
  const std::shared_ptr<Replica> replica_;
  const uint64_t prompt_tokens_;
  std::optional<uint64_t> accepted_after_;
};

}  // namespace kvasir::router
