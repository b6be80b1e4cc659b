#include "worker/service/server.h"

#include <utility>

#include "base/status_macros.h"

namespace kvasir::worker {

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Start(
    WorkerServerOptions options, ServedEngine* engine) {
  std::unique_ptr<WorkerServer> worker(new WorkerServer);
  base::GrpcServerOptions listener;
  const bool on_unix_socket = !options.listen.unix_path.empty();
  listener.listen = std::move(options.listen);
  listener.credentials = std::move(options.credentials);
  listener.max_receive_message_bytes =
      base::MaxMessageBytesFor(options.service.info.max_model_len());
  listener.min_ping_interval = options.min_ping_interval;
  listener.max_connection_age = options.max_connection_age;
  // gRPC (1.51) closes an aged connection right after its last call. If the
  // client writes at that moment (a window update), a write to the Unix socket
  // fails with EPIPE, and the client drops the part of the answer that it has
  // not read yet.
  if (on_unix_socket) {
    listener.max_connection_age = absl::InfiniteDuration();
    listener.max_connection_idle = absl::InfiniteDuration();
  }
  options.service.on_drain = [raw = worker.get()] { raw->BeginDrain(); };
  worker->service_ =
      std::make_unique<WorkerService>(std::move(options.service), engine);
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<base::GrpcServer> server,
      base::GrpcServer::Start(listener, {worker->service_.get()}));
  {
    base::MutexLock lock(&worker->mutex_);
    worker->server_ = std::move(server);
  }
  worker->SetReady(false);
  return worker;
}

WorkerServer::~WorkerServer() {
  if (server_ != nullptr) Shutdown(absl::InfinitePast());
}

void WorkerServer::SetReady(bool ready) {
  base::MutexLock lock(&mutex_);
  // Null if a drain arrives during Start, when the server already listens.
  // Start then sets the health itself.
  if (server_ == nullptr) return;
  if (draining_) ready = false;
  server_->SetServing("", ready);
  server_->SetServing(kvasir::v1::Worker::service_full_name(), ready);
}

void WorkerServer::BeginDrain() {
  {
    base::MutexLock lock(&mutex_);
    draining_ = true;
  }
  SetReady(false);
}

kvasir::v1::DrainResponse WorkerServer::Drain(absl::Time deadline) {
  return service_->DrainAndWait(deadline);
}

void WorkerServer::Shutdown(absl::Time deadline) {
  service_->Close();
  server_->Shutdown(deadline);
}

}  // namespace kvasir::worker
