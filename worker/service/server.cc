#include "worker/service/server.h"

#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "worker/engine/admission.h"

namespace kvasir::worker {
namespace {

// How long a drain waits for requests to end after RefuseAll. They end within
// one step unless the engine hangs.
constexpr absl::Duration kEndGrace = absl::Seconds(10);

}  // namespace

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
  // Connections over a Unix socket must not age. gRPC (1.51) closes an aged
  // connection right after its last call. If the client writes at that moment
  // (for example an HTTP/2 window update), the write fails with EPIPE, and the
  // client loses the part of the answer that it has not read yet.
  if (on_unix_socket) {
    listener.max_connection_age = absl::InfiniteDuration();
    listener.max_connection_idle = absl::InfiniteDuration();
  }
  worker->engine_ = engine;
  worker->service_ =
      std::make_unique<WorkerService>(std::move(options.service), engine);
  KVASIR_ASSIGN_OR_RETURN(
      worker->server_,
      base::GrpcServer::Start(listener, {worker->service_.get()}));
  worker->SetReady(false);
  return worker;
}

WorkerServer::~WorkerServer() {
  if (server_ != nullptr) Shutdown(absl::InfinitePast());
}

void WorkerServer::SetReady(bool ready) {
  base::MutexLock lock(&mutex_);
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

DrainCounts WorkerServer::Drain(absl::Time deadline) {
  BeginDrain();
  const EngineTotals start = engine_->Totals();
  engine_->BeginDrain();
  if (!engine_->WaitIdle(deadline)) {
    // Refuse the requests instead of aborting them, because a router would take
    // the output of an aborted request for a complete answer.
    engine_->RefuseAll(Admission::DrainEnded());
    engine_->WaitIdle(base::Clock::Real().Now() + kEndGrace);
  }
  const EngineTotals end = engine_->Totals();
  return {.finished = static_cast<uint32_t>(end.finished - start.finished),
          .aborted = static_cast<uint32_t>(end.aborted + end.failed -
                                           start.aborted - start.failed)};
}

void WorkerServer::Shutdown(absl::Time deadline) {
  service_->Close();
  server_->Shutdown(deadline);
}

}  // namespace kvasir::worker
