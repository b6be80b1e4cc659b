// Serves kvasir.v1.Worker over gRPC's callback API. The gRPC reactors only
// convert, enqueue and write messages; GenerateStream and LoadPublisher decide
// what to send.
#pragma once

#include <memory>

#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/load_heartbeat.h"
#include "worker/engine/served_engine.h"
#include "worker/service/load_publisher.h"
#include "worker/service/output_pump.h"

namespace kvasir::worker {

struct WorkerServiceOptions {
  // The answer of GetInfo. A request that asks for a weights_id other than this
  // one is refused.
  kvasir::v1::WorkerInfo info;
  // The most bytes that a stream may queue while its client reads slowly. If
  // more are queued, the call is reset.
  size_t max_queued_bytes = 1 << 20;
  absl::Duration load_heartbeat = proto::kLoadHeartbeat;
};

// Owns: the threads for output and load reports.
// Threads: gRPC's threads call the RPC methods; any thread may call the other
//   methods.
class WorkerService final : public kvasir::v1::Worker::CallbackService {
 public:
  // `engine` must outlive the service.
  WorkerService(WorkerServiceOptions options, ServedEngine* engine);
  // The gRPC server must have been shut down before.
  ~WorkerService() override;

  // Ends all WatchLoad calls, which would delay a server's shutdown.
  void Close() { load_->Stop(); }

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

 private:
  const WorkerServiceOptions options_;
  ServedEngine* const engine_;
  const std::shared_ptr<OutputPump> pump_;
  const std::shared_ptr<LoadPublisher> load_;
};

}  // namespace kvasir::worker
