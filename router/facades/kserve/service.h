// The facade inference.GRPCInferenceService: KServe v2 and Triton's streaming,
// for clients that exist. Thin: reactors convert and post, KserveStream
// decides.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "proto/inference/grpc_service.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/service_parts.h"
#include "router/facades/kserve/backend.h"

namespace kvasir::router {

struct KserveServiceOptions : FacadeOptions {
  KserveLimits limits;
};

// Register it with a server; grpc.health.v1 names it kKserveServiceName.
// Outlives the server (all calls have ended). The router outlives it.
//
// Owns: the tokenizer's and the streams' threads.
// Threads: any thread. Errors: as in the wire protocol; an RPC that is not
// built
//   answers UNIMPLEMENTED with its name.
class KserveService final
    : public inference::GRPCInferenceService::CallbackService {
 public:
  KserveService(KserveServiceOptions options, RequestRouter* router);
  ~KserveService() override;

  // What all of its calls share.
  std::shared_ptr<const KserveBackend> backend() const { return backend_; }

  // Ends every open stream with UNAVAILABLE as soon as no request of it runs,
  // so that a shutdown need not wait for clients that keep one open; then, by
  // EndStreams, those that clients have opened since.
  void BeginDrain();
  void EndStreams();

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

  // Not built.
  grpc::ServerUnaryReactor* RepositoryModelLoad(
      grpc::CallbackServerContext* context,
      const inference::RepositoryModelLoadRequest* request,
      inference::RepositoryModelLoadResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelUnload(
      grpc::CallbackServerContext* context,
      const inference::RepositoryModelUnloadRequest* request,
      inference::RepositoryModelUnloadResponse* response) override;
  grpc::ServerUnaryReactor* SystemSharedMemoryStatus(
      grpc::CallbackServerContext* context,
      const inference::SystemSharedMemoryStatusRequest* request,
      inference::SystemSharedMemoryStatusResponse* response) override;
  grpc::ServerUnaryReactor* SystemSharedMemoryRegister(
      grpc::CallbackServerContext* context,
      const inference::SystemSharedMemoryRegisterRequest* request,
      inference::SystemSharedMemoryRegisterResponse* response) override;
  grpc::ServerUnaryReactor* SystemSharedMemoryUnregister(
      grpc::CallbackServerContext* context,
      const inference::SystemSharedMemoryUnregisterRequest* request,
      inference::SystemSharedMemoryUnregisterResponse* response) override;
  grpc::ServerUnaryReactor* CudaSharedMemoryStatus(
      grpc::CallbackServerContext* context,
      const inference::CudaSharedMemoryStatusRequest* request,
      inference::CudaSharedMemoryStatusResponse* response) override;
  grpc::ServerUnaryReactor* CudaSharedMemoryRegister(
      grpc::CallbackServerContext* context,
      const inference::CudaSharedMemoryRegisterRequest* request,
      inference::CudaSharedMemoryRegisterResponse* response) override;
  grpc::ServerUnaryReactor* CudaSharedMemoryUnregister(
      grpc::CallbackServerContext* context,
      const inference::CudaSharedMemoryUnregisterRequest* request,
      inference::CudaSharedMemoryUnregisterResponse* response) override;
  grpc::ServerUnaryReactor* TraceSetting(
      grpc::CallbackServerContext* context,
      const inference::TraceSettingRequest* request,
      inference::TraceSettingResponse* response) override;
  grpc::ServerUnaryReactor* LogSettings(
      grpc::CallbackServerContext* context,
      const inference::LogSettingsRequest* request,
      inference::LogSettingsResponse* response) override;

 private:
  const std::string server_version_;
  const FacadeThreads threads_;
  const std::shared_ptr<KserveBackend> backend_;
};

inline constexpr char kKserveServiceName[] = "inference.GRPCInferenceService";

}  // namespace kvasir::router
