// The interface through which the router uses a worker. It does not depend on
// gRPC, so that its users can be tested without gRPC.
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

// The address of a worker.
struct WorkerAddress {
  std::string target;  // "host:port" or "unix:/path"
  // The name that the worker's certificate must have, unless other names are
  // allowed. If empty, the target's host.
  std::string tls_name = "";
};

// The data of one attempt to run a request at a worker.
struct WorkerCall {
  // The request without token ids. prompt_token_ids and emitted_token_ids are
  // empty; `prompt` and `emitted` have these ids.
  kvasir::v1::GenerateRequest head;
  // The prompt, which is sent without a copy.
  proto::TokenBytes prompt;
  // The tokens that earlier attempts have delivered, encoded like TokenBytes.
  std::string emitted;
  absl::Time deadline = absl::InfiniteFuture();
};

// Receives the events of one attempt.
// Threads: the transport's threads make the calls, one at a time. A call must
// not block.
class AttemptSink {
 public:
  virtual ~AttemptSink() = default;
  virtual void OnEvent(const kvasir::v1::GenerateEvent& event) = 0;
  // The attempt has ended; this is the sink's last call. If the
  // worker has refused the request, the refusal is in the status's
  // payload (proto/refusal.h).
  virtual void OnAttemptDone(const absl::Status& status) = 0;
};

// One attempt to run a request at a worker. Dropping this object does not
// cancel the attempt.
// Threads: its methods may be called from any thread.
class Attempt {
 public:
  virtual ~Attempt() = default;
  // Starts the attempt. Call this once. It is always followed by a call of the
  // sink's OnAttemptDone, which comes later and not inside Start.
  virtual void Start() = 0;
  // Resets the call to the worker. May be called before Start and more
  // than once.
  virtual void Cancel() = 0;
};

class LoadSink {
 public:
  virtual ~LoadSink() = default;
  virtual void OnReport(const kvasir::v1::LoadReport& report) = 0;
  // The watch has ended with this error; this is the sink's last call.
  virtual void OnWatchEnded(const absl::Status& status) = 0;
};

// The router's connection to one worker. Callbacks always run later, and never
// inside the method that takes them.
// Threads: its methods may be called from any thread.
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
  // Resets every call and prevents new ones. The callbacks of the reset calls
  // still run.
  virtual void Close() = 0;
};

}  // namespace kvasir::router
