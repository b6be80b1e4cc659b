// gRPC's side of ModelInfer and ModelStreamInfer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "proto/inference/grpc_service.pb.h"
#include "router/facades/kserve/backend.h"
#include "router/facades/kserve/stream.h"

namespace kvasir::router {

// Deletes itself in OnDone, which gRPC calls after End has been called and
// every reaction has returned.
// Threads: reactions on gRPC's threads, the sink's methods on the strand; they
//   share only gRPC's own state.
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
  // gRPC uses it between StartRead and OnReadDone.
  inference::ModelInferRequest request_;
  // gRPC uses it between StartWrite and OnWriteDone.
  inference::ModelStreamInferResponse response_;
};

// A stream of one request and one response, with the same lifetime as above.
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
