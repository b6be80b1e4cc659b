// A worker's gRPC side in one object: listener, health and kvasir.v1.Worker.
//
//   auto server = WorkerServer::Start(options, engine.get());
//   (*server)->SetReady(true);            // after the engine's warm-up
//   ...
//   // SIGTERM:
//   (*server)->Drain(base::Clock::Real().Now() + absl::Seconds(30));
//   (*server)->Shutdown(absl::Now() + absl::Seconds(1));
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/grpc_server.h"
#include "worker/service/service.h"

namespace kvasir::worker {

struct WorkerServerOptions {
  base::ListenAddress listen;
  std::shared_ptr<grpc::ServerCredentials> credentials;  // null: plain text
  // info.max_model_len also sets the largest message. on_drain is set here.
  WorkerServiceOptions service;
  // Routers ping every 5 s, which this must allow on connections without data:
  // a request may wait for its first token far longer than that.
  absl::Duration min_ping_interval = absl::Seconds(4);
};

// Threads: any thread.
// Errors: see base::GrpcServer::Start.
class WorkerServer {
 public:
  // `engine` outlives it.
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Start(
      WorkerServerOptions options, ServedEngine* engine);
  // Cancels what still runs.
  ~WorkerServer();

  int port() const { return server_->port(); }
  const std::string& target() const { return server_->target(); }

  // grpc.health.v1, for the server and for kvasir.v1.Worker. Not ready at
  // first; stays not ready once a drain has begun.
  void SetReady(bool ready) ABSL_LOCKS_EXCLUDED(mutex_);
  // Turns not ready, refuses new requests, waits for the running ones until the
  // deadline, aborts the rest.
  kvasir::v1::DrainResponse Drain(absl::Time deadline);
  // Ends all calls by the deadline. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  WorkerServer() = default;
  void BeginDrain() ABSL_LOCKS_EXCLUDED(mutex_);

  // Outlive the service, whose drainer uses them.
  base::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<WorkerService> service_;
  // Set under mutex_ before Start returns, constant from there; calls that
  // arrive earlier find null.
  std::unique_ptr<base::GrpcServer> server_;
};

}  // namespace kvasir::worker
