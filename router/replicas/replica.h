// One replica as the router knows it: its state, its last report, and the
// requests it has been sent since.
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
#include "router/replicas/worker_client.h"

namespace kvasir::router {

inline constexpr char kApiVersion[] = "kvasir.v1";

enum class ReplicaState {
  kConnecting,  // not reached yet
  kReady,
  kDraining,
  kLost,     // was reached; the router tries again
  kRefused,  // has another version or serves other weights
};
const char* ReplicaStateName(ReplicaState state);

// Threads: any thread, several at once. Must not block.
class ReplicaObserver {
 public:
  virtual ~ReplicaObserver() = default;
  virtual void OnReplicaState(const std::string& /*target*/,
                              ReplicaState /*state*/) {}
};

// The properties that a worker must have to be used.
struct Expected {
  // The facades' tokenizer; empty: any.
  std::string tokenizer_hash;
  // A replica of the same model that is in use; absent: there is none.
  std::optional<kvasir::v1::WorkerInfo> peer;
};

// FAILED_PRECONDITION names the worker, what it has and what is wanted.
absl::Status CheckWorker(const std::string& target,
                         const kvasir::v1::WorkerInfo& info,
                         const Expected& expected);

// Owns: the client.
// Threads: any thread.
class Replica {
 public:
  Replica(std::string target, std::unique_ptr<WorkerClient> client)
      : target_(std::move(target)), client_(std::move(client)) {}

  const std::string& target() const { return target_; }
  WorkerClient* client() const { return client_.get(); }

  // Events of the connection. OnInfo: the worker has passed its checks. A
  // returned duration is the time until the next attempt to connect.
  void OnInfo(const kvasir::v1::WorkerInfo& info) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration OnRefused(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration OnLost(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The replica is ready from the first report on.
  void OnReport(const kvasir::v1::LoadReport& report)
      ABSL_LOCKS_EXCLUDED(mutex_);

  ReplicaState state() const ABSL_LOCKS_EXCLUDED(mutex_);
  // It has passed its checks and is not lost. Other replicas must agree with
  // it.
  bool in_use() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The last problem; empty if there is none.
  std::string detail() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<kvasir::v1::WorkerInfo> info() const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // `eligible` considers only the replica itself.
  ReplicaView view() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Requests sent and not ended.
  uint32_t in_flight() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class ReplicaLease;
  void OnSent(uint64_t prompt_tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAccepted(uint64_t prompt_tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnEnded(uint64_t prompt_tokens, bool accepted)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration NextBackoff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string target_;
  const std::unique_ptr<WorkerClient> client_;

  mutable base::Mutex mutex_;
  ReplicaState state_ ABSL_GUARDED_BY(mutex_) = ReplicaState::kConnecting;
  std::string detail_ ABSL_GUARDED_BY(mutex_);
  std::optional<kvasir::v1::WorkerInfo> info_ ABSL_GUARDED_BY(mutex_);
  kvasir::v1::LoadReport report_ ABSL_GUARDED_BY(mutex_);
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  // Sent, but not yet accepted by the worker.
  uint32_t unaccepted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t unaccepted_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  // Accepted after the last report.
  uint32_t fresh_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t fresh_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Counts one request in a replica's load, from sending it to its end.
// Threads: one at a time.
class ReplicaLease {
 public:
  ReplicaLease(std::shared_ptr<Replica> replica, uint64_t prompt_tokens)
      : replica_(std::move(replica)), prompt_tokens_(prompt_tokens) {
    replica_->OnSent(prompt_tokens_);
  }
  ~ReplicaLease() { replica_->OnEnded(prompt_tokens_, accepted_); }
  ReplicaLease(const ReplicaLease&) = delete;
  ReplicaLease& operator=(const ReplicaLease&) = delete;

  void OnAccepted() {
    if (!accepted_) replica_->OnAccepted(prompt_tokens_);
    accepted_ = true;
  }

 private:
  const std::shared_ptr<Replica> replica_;
  const uint64_t prompt_tokens_;
  bool accepted_ = false;
};

}  // namespace kvasir::router
