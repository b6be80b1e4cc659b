// A worker's gRPC server: listener, health service and kvasir.v1.Worker.
//
//   auto server = WorkerServer::Start(options, engine.get());
//   (*server)->SetReady(true);            // after the engine's warm-up
//   (*server)->Drain(drain_deadline);       // on SIGTERM
//   (*server)->Shutdown(shutdown_deadline);
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/net/grpc_server.h"
#include "worker/service/service.h"

namespace kvasir::worker {

struct WorkerServerOptions {
  base::ListenAddress listen;
  std::shared_ptr<grpc::ServerCredentials> credentials;  // null: plain text
  // service.info.max_model_len also determines the size of the largest message
  // that the server accepts.
  WorkerServiceOptions service;
  // See GrpcServerOptions. Routers ping every 5 s while nothing arrives, for
  // example while a request waits for its first token.
  absl::Duration min_ping_interval =
      base::GrpcServerOptions().min_ping_interval;
  // A TCP connection older than this gets a GOAWAY, so that its client
  // reconnects. That renews certificates and spreads load over servers.
  // Connections over Unix sockets need neither and have no maximum age.
  absl::Duration max_connection_age = absl::Hours(1);
};

// The requests that ended during a drain.
struct DrainCounts {
  uint32_t finished = 0;
  // Requests that were refused at the drain's deadline, were aborted, or
  // failed.
  uint32_t aborted = 0;
};

// Threads: any thread may call any method.
// Errors: those of base::GrpcServer::Start.
class WorkerServer {
 public:
  // `engine` must outlive the server.
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Start(
      WorkerServerOptions options, ServedEngine* engine);
  // Cancels all running calls.
  ~WorkerServer();

  int port() const { return server_->port(); }
  const std::string& target() const { return server_->target(); }

  // Sets the health (grpc.health.v1) that is reported for the whole server and
  // for kvasir.v1.Worker. Before the first call, and once a drain has begun,
  // the reported health is NOT_SERVING.
  void SetReady(bool ready) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports NOT_SERVING, refuses new requests, and waits until the deadline for
  // accepted requests to end. Then it ends the remaining requests with a
  // refusal. The worker never becomes ready again.
  DrainCounts Drain(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all calls by the deadline. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  WorkerServer() = default;
  void BeginDrain() ABSL_LOCKS_EXCLUDED(mutex_);

  base::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  ServedEngine* engine_ = nullptr;
  std::unique_ptr<WorkerService> service_;
  std::unique_ptr<base::GrpcServer> server_;
};

}  // namespace kvasir::worker
