// kvasir.v1.Worker over gRPC's callback API. Reactors only convert, enqueue and
// write; what to do is decided by GenerateStream, LoadPublisher and Drainer.
#pragma once

#include <functional>
#include <memory>

#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "worker/engine/served_engine.h"
#include "worker/service/drainer.h"
#include "worker/service/load_publisher.h"
#include "worker/service/output_pump.h"

namespace kvasir::worker {

struct WorkerServiceOptions {
  // What GetInfo answers. A request for another weights_id is refused.
  kvasir::v1::WorkerInfo info;
  // Per stream, while its reader is behind; then the stream is reset.
  size_t max_queued_bytes = 1 << 20;
  absl::Duration load_heartbeat = absl::Seconds(1);
  // Where a Drain names no deadline.
  absl::Duration drain_deadline = absl::Seconds(60);
  // Runs once, before admission stops: turn NOT_SERVING.
  std::function<void()> on_drain = [] {};
};

// Owns: the threads that carry output, load and drain.
// Threads: gRPC's threads call the methods; the rest from any thread.
class WorkerService final : public kvasir::v1::Worker::CallbackService {
 public:
  // `engine` outlives the service and takes requests already.
  WorkerService(WorkerServiceOptions options, ServedEngine* engine);
  // The server that runs it has been shut down.
  ~WorkerService() override;

  // What a Drain call does, blocking: SIGTERM's path.
  kvasir::v1::DrainResponse DrainAndWait(absl::Time deadline);
  // Ends what would hold a server's shutdown up: WatchLoad calls, and a Drain
  // that still waits.
  void Close() {
    load_->Stop();
    drainer_.Stop();
  }

  grpc::ServerWriteReactor<kvasir::v1::GenerateEvent>* Generate(
      grpc::CallbackServerContext* context,
      const kvasir::v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const kvasir::v1::AbortRequest* request,
                                  kvasir::v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const kvasir::v1::GetInfoRequest* request,
                                    kvasir::v1::WorkerInfo* response) override;
  grpc::ServerWriteReactor<kvasir::v1::LoadReport>* WatchLoad(
      grpc::CallbackServerContext* context,
      const kvasir::v1::WatchLoadRequest* request) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const kvasir::v1::DrainRequest* request,
                                  kvasir::v1::DrainResponse* response) override;

 private:
  const WorkerServiceOptions options_;
  ServedEngine* const engine_;
  const std::shared_ptr<OutputPump> pump_;
  const std::shared_ptr<LoadPublisher> load_;
  Drainer drainer_;
};

}  // namespace kvasir::worker
