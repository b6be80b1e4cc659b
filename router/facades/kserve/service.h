// The facade that serves inference.GRPCInferenceService: the KServe v2 protocol
// with Triton's extension for streaming, so that existing clients can use this
// server. Reactors only convert messages and post tasks; KserveStream contains
// the logic.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"
#include "router/facades/calls/replies.h"
#include "router/facades/kserve/backend.h"

namespace kvasir::router {

// The service and its facade.
// Owns: the tokenizer's and the streams' threads.
// Threads: its methods may be called from any thread.
// Errors: gRPC statuses, as the wire protocol defines them. An RPC that is not
// implemented answers UNIMPLEMENTED; the text contains its name.
class KserveService final
    : public inference::GRPCInferenceService::CallbackService,
      public Facade {
 public:
  KserveService(const FacadeOptions& options, RequestRouter* router);

  std::vector<grpc::Service*> services() override { return {this}; }
  std::vector<std::string> names() const override {
    return {inference::GRPCInferenceService::service_full_name()};
  }
  absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const override;
  void BeginDrain() override { backend_->streams.BeginDrain(); }
  void EndStreams() override { backend_->streams.EndAll(); }

  grpc::ServerUnaryReactor* ServerLive(
      grpc::CallbackServerContext* context,
      const inference::ServerLiveRequest* request,
      inference::ServerLiveResponse* response) override;
  grpc::ServerUnaryReactor* ServerReady(
      grpc::CallbackServerContext* context,
      const inference::ServerReadyRequest* request,
      inference::ServerReadyResponse* response) override;
  grpc::ServerUnaryReactor* ModelReady(
      grpc::CallbackServerContext* context,
      const inference::ModelReadyRequest* request,
      inference::ModelReadyResponse* response) override;
  grpc::ServerUnaryReactor* ServerMetadata(
      grpc::CallbackServerContext* context,
      const inference::ServerMetadataRequest* request,
      inference::ServerMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelMetadata(
      grpc::CallbackServerContext* context,
      const inference::ModelMetadataRequest* request,
      inference::ModelMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelConfig(
      grpc::CallbackServerContext* context,
      const inference::ModelConfigRequest* request,
      inference::ModelConfigResponse* response) override;
  grpc::ServerUnaryReactor* ModelStatistics(
      grpc::CallbackServerContext* context,
      const inference::ModelStatisticsRequest* request,
      inference::ModelStatisticsResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryIndex(
      grpc::CallbackServerContext* context,
      const inference::RepositoryIndexRequest* request,
      inference::RepositoryIndexResponse* response) override;

  grpc::ServerUnaryReactor* ModelInfer(
      grpc::CallbackServerContext* context,
      const inference::ModelInferRequest* request,
      inference::ModelInferResponse* response) override;
  grpc::ServerBidiReactor<inference::ModelInferRequest,
                          inference::ModelStreamInferResponse>*
  ModelStreamInfer(grpc::CallbackServerContext* context) override;

  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService, RepositoryModelLoad,
                       inference::RepositoryModelLoadRequest,
                       inference::RepositoryModelLoadResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService, RepositoryModelUnload,
                       inference::RepositoryModelUnloadRequest,
                       inference::RepositoryModelUnloadResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService,
                       SystemSharedMemoryStatus,
                       inference::SystemSharedMemoryStatusRequest,
                       inference::SystemSharedMemoryStatusResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService,
                       SystemSharedMemoryRegister,
                       inference::SystemSharedMemoryRegisterRequest,
                       inference::SystemSharedMemoryRegisterResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService,
                       SystemSharedMemoryUnregister,
                       inference::SystemSharedMemoryUnregisterRequest,
                       inference::SystemSharedMemoryUnregisterResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService, CudaSharedMemoryStatus,
                       inference::CudaSharedMemoryStatusRequest,
                       inference::CudaSharedMemoryStatusResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService,
                       CudaSharedMemoryRegister,
                       inference::CudaSharedMemoryRegisterRequest,
                       inference::CudaSharedMemoryRegisterResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService,
                       CudaSharedMemoryUnregister,
                       inference::CudaSharedMemoryUnregisterRequest,
                       inference::CudaSharedMemoryUnregisterResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService, TraceSetting,
                       inference::TraceSettingRequest,
                       inference::TraceSettingResponse)
  KVASIR_RPC_NOT_BUILT(inference::GRPCInferenceService, LogSettings,
                       inference::LogSettingsRequest,
                       inference::LogSettingsResponse)

 private:
  const FacadeThreads threads_;
  const std::shared_ptr<KserveBackend> backend_;
};

}  // namespace kvasir::router
