// The gRPC reactors of ModelInfer and ModelStreamInfer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "proto/inference/grpc_service.pb.h"
#include "router/facades/kserve/backend.h"
#include "router/facades/kserve/stream.h"

namespace kvasir::router {

// The reactor of a ModelStreamInfer call. Deletes itself in OnDone, which gRPC
// calls after End has been called and all other On... methods have returned.
// Threads: gRPC's threads call the On... methods, and the stream's strand calls
// the methods of KserveStreamSink. These two groups of methods share only
// gRPC's own state.
class KserveStreamReactor final
    : public grpc::ServerBidiReactor<inference::ModelInferRequest,
                                     inference::ModelStreamInferResponse>,
      public KserveStreamSink {
 public:
  KserveStreamReactor(std::shared_ptr<KserveBackend> backend,
                      std::shared_ptr<TaskRunner> runner,
                      grpc::CallbackServerContext* context);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Read() override;
  void Write(inference::ModelStreamInferResponse response) override;
  void Reset() override;
  void End(const absl::Status& status) override;

 private:
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<KserveBackend> backend_;
  const ClientCall call_;
  const std::shared_ptr<KserveStream> stream_;
  // Must not be used between StartRead and OnReadDone, because gRPC fills
  // it then.
  inference::ModelInferRequest request_;
  // Must not change between StartWrite and OnWriteDone, because gRPC reads
  // it then.
  inference::ModelStreamInferResponse response_;
};

// The reactor of a ModelInfer call. KserveStream serves such a call as a stream
// of one request and one response. The reactor deletes itself in OnDone.
class KserveUnaryReactor final : public grpc::ServerUnaryReactor,
                                 public KserveStreamSink {
 public:
  // `request` and `response` must live until OnDone.
  KserveUnaryReactor(std::shared_ptr<KserveBackend> backend,
                     std::shared_ptr<TaskRunner> runner,
                     grpc::CallbackServerContext* context,
                     const inference::ModelInferRequest* request,
                     inference::ModelInferResponse* response);

  void OnCancel() override;
  void OnDone() override;

  void Read() override {}
  void Write(inference::ModelStreamInferResponse response) override;
  void Reset() override {}
  void End(const absl::Status& status) override;

 private:
  inference::ModelInferResponse* const response_;
  const ClientCall call_;
  const std::shared_ptr<KserveStream> stream_;
};

}  // namespace kvasir::router
