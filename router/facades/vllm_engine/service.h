// The facade that serves vllm.grpc.engine.VllmEngine, the protocol of the
// gateway smg and others, with token ids as input and output. Reactors only
// convert messages and post tasks; SingleCall contains the logic.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "proto/vllm/engine.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"
#include "router/facades/calls/replies.h"
#include "router/facades/vllm_engine/backend.h"

namespace kvasir::router {

// The service and its facade.
// Owns: the tokenizer's and the streams' threads.
// Threads: its methods may be called from any thread.
// Errors: gRPC statuses, as the wire protocol defines them. An RPC that is not
// implemented answers UNIMPLEMENTED; the text contains its name.
class VllmEngineService final
    : public vllm::grpc::engine::VllmEngine::CallbackService,
      public Facade {
 public:
  VllmEngineService(const FacadeOptions& options, RequestRouter* router);

  std::vector<grpc::Service*> services() override { return {this}; }
  std::vector<std::string> names() const override {
    return {vllm::grpc::engine::VllmEngine::service_full_name()};
  }
  absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const override;

  grpc::ServerWriteReactor<vllm::grpc::engine::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Abort(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::AbortRequest* request,
      vllm::grpc::engine::AbortResponse* response) override;
  grpc::ServerUnaryReactor* HealthCheck(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::HealthCheckRequest* request,
      vllm::grpc::engine::HealthCheckResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::GetModelInfoRequest* request,
      vllm::grpc::engine::GetModelInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::GetServerInfoRequest* request,
      vllm::grpc::engine::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetLoads(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::GetLoadsRequest* request,
      vllm::grpc::engine::GetLoadsResponse* response) override;
  grpc::ServerWriteReactor<smg::grpc::common::GetTokenizerChunk>* GetTokenizer(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::GetTokenizerRequest* request) override;

  // These RPCs, and the stream SubscribeKvEvents below, are not implemented.
  KVASIR_RPC_NOT_BUILT(vllm::grpc::engine::VllmEngine, Embed,
                       vllm::grpc::engine::EmbedRequest,
                       vllm::grpc::engine::EmbedResponse)
  KVASIR_RPC_NOT_BUILT(vllm::grpc::engine::VllmEngine, FlushCache,
                       smg::grpc::common::FlushCacheRequest,
                       smg::grpc::common::FlushCacheResponse)
  KVASIR_RPC_NOT_BUILT(vllm::grpc::engine::VllmEngine, StartProfile,
                       smg::grpc::common::StartProfileRequest,
                       smg::grpc::common::ProfileResponse)
  KVASIR_RPC_NOT_BUILT(vllm::grpc::engine::VllmEngine, StopProfile,
                       smg::grpc::common::StopProfileRequest,
                       smg::grpc::common::ProfileResponse)
  grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>* SubscribeKvEvents(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::SubscribeKvEventsRequest* request) override;

 private:
  const FacadeThreads threads_;
  const std::shared_ptr<VllmEngineBackend> backend_;
};

}  // namespace kvasir::router
