// kvasir.v1.Worker over gRPC's callback API. Reactors only convert, enqueue and
// write. GenerateStream, LoadPublisher and Drainer decide what to do.
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
  // The answer of GetInfo. A request for another weights_id is refused.
  kvasir::v1::WorkerInfo info;
  // The most bytes that a stream may queue if its client reads slowly. A stream
  // that needs more is reset.
  size_t max_queued_bytes = 1 << 20;
  absl::Duration load_heartbeat = absl::Seconds(1);
  // The deadline of a Drain that names none.
  absl::Duration drain_deadline = absl::Seconds(60);
  // Runs once, before admission stops, to report NOT_SERVING.
  std::function<void()> on_drain = [] {};
};

// Owns: the threads for output, load reports and drains.
// Threads: gRPC's threads call the RPC methods; the others from any thread.
class WorkerService final : public kvasir::v1::Worker::CallbackService {
 public:
  // `engine` outlives the service and has been started.
  WorkerService(WorkerServiceOptions options, ServedEngine* engine);
  // Its server must have been shut down.
  ~WorkerService() override;

  // Like a Drain call, but blocks until it is done. For SIGTERM.
  kvasir::v1::DrainResponse DrainAndWait(absl::Time deadline);
  // Ends the calls that would delay a server's shutdown: WatchLoad, and a Drain
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
