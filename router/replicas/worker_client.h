// One worker as the router sees it. The interface does not use gRPC, so that
// its users are tested without it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"

namespace kvasir::router {

// One attempt of a request at one worker.
struct WorkerCall {
  // Everything except the two fields of ids, which stay empty in it.
  kvasir::v1::GenerateRequest head;
  // Sent without a copy in every attempt.
  proto::TokenBytes prompt;
  // Tokens that earlier attempts delivered, encoded like TokenBytes.
  std::string emitted;
  absl::Time deadline = absl::InfiniteFuture();
};

// Receives the events of one attempt.
// Threads: one call at a time, on the transport's threads; must not block.
class AttemptSink {
 public:
  virtual ~AttemptSink() = default;
  virtual void OnEvent(const kvasir::v1::GenerateEvent& event) = 0;
  // The last call. A refusal is in the status's payload (proto/refusal.h).
  virtual void OnAttemptDone(const absl::Status& status) = 0;
};

// Threads: any thread. Dropping it does not cancel.
class Attempt {
 public:
  virtual ~Attempt() = default;
  // Call once, first. OnAttemptDone follows in every case, but not within
  // Start.
  virtual void Start() = 0;
  // Resets the call. Idempotent; may come before Start.
  virtual void Cancel() = 0;
};

class LoadSink {
 public:
  virtual ~LoadSink() = default;
  virtual void OnReport(const kvasir::v1::LoadReport& report) = 0;
  // The last call: the watch has ended, never with OK.
  virtual void OnWatchEnded(const absl::Status& status) = 0;
};

// Threads: any thread. Callbacks never run within the call that requests them.
class WorkerClient {
 public:
  virtual ~WorkerClient() = default;
  virtual std::shared_ptr<Attempt> NewAttempt(
      WorkerCall call, std::shared_ptr<AttemptSink> sink) = 0;
  virtual void GetInfo(
      absl::Duration timeout,
      std::function<void(absl::StatusOr<kvasir::v1::WorkerInfo>)> done) = 0;
  virtual void WatchLoad(absl::Duration min_interval,
                         std::shared_ptr<LoadSink> sink) = 0;
  // Resets every call, and no call starts from now on. Callbacks still come.
  virtual void Close() = 0;
};

}  // namespace kvasir::router
