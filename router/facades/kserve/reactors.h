// The gRPC reactors of ModelInfer and ModelStreamInfer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "proto/inference/grpc_service.pb.h"
#include "router/facades/kserve/backend.h"
#include "router/facades/kserve/stream.h"

namespace kvasir::router {

// The reactor of a ModelStreamInfer call. Deletes itself in OnDone, which gRPC
// calls after End has been called and every reaction has returned. Threads:
// gRPC's threads call the reactions (On... methods), and the stream's strand
// calls the methods of KserveStreamSink. These two groups of methods share only
// gRPC's state.
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
  // gRPC fills this between StartRead and OnReadDone, so it must not be used
  // then.
  inference::ModelInferRequest request_;
  // gRPC reads this between StartWrite and OnWriteDone, so it must not change
  // then.
  inference::ModelStreamInferResponse response_;
};

// The reactor of a ModelInfer call, which KserveStream serves as a stream of
// one request and one response. It also deletes itself in OnDone.
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
