// The facade vllm.grpc.engine.VllmEngine: token ids in and out, for the gateway
// smg and what routes for it. Thin: reactors convert and post, SingleCall
// decides.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "proto/vllm/engine.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/service_parts.h"
#include "router/facades/vllm_engine/backend.h"

namespace kvasir::router {

struct VllmEngineServiceOptions : FacadeOptions {
  FacadeLimits limits;
  // Empty: there is no tokenizer to give.
  std::string tokenizer_folder;
  // Whether whoever reaches this listener may have its files.
  bool shares_tokenizer = false;
};

// Register it with a server; grpc.health.v1 names it kVllmEngineServiceName.
// Outlives the server (all calls have ended). The router outlives it.
//
// Owns: the tokenizer's and the streams' threads.
// Threads: any thread. Errors: as in the wire protocol; an RPC that is not
//   built answers UNIMPLEMENTED with its name.
class VllmEngineService final
    : public vllm::grpc::engine::VllmEngine::CallbackService {
 public:
  VllmEngineService(VllmEngineServiceOptions options, RequestRouter* router);
  ~VllmEngineService() override;

  // What all of its calls share.
  std::shared_ptr<const VllmEngineBackend> backend() const { return backend_; }

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

  // Not built.
  grpc::ServerUnaryReactor* Embed(
      grpc::CallbackServerContext* context,
      const vllm::grpc::engine::EmbedRequest* request,
      vllm::grpc::engine::EmbedResponse* response) override;
  grpc::ServerUnaryReactor* FlushCache(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::FlushCacheRequest* request,
      smg::grpc::common::FlushCacheResponse* response) override;
  grpc::ServerUnaryReactor* StartProfile(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::StartProfileRequest* request,
      smg::grpc::common::ProfileResponse* response) override;
  grpc::ServerUnaryReactor* StopProfile(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::StopProfileRequest* request,
      smg::grpc::common::ProfileResponse* response) override;
  grpc::ServerWriteReactor<smg::grpc::common::KvEventBatch>* SubscribeKvEvents(
      grpc::CallbackServerContext* context,
      const smg::grpc::common::SubscribeKvEventsRequest* request) override;

 private:
  const std::string server_version_;
  const FacadeThreads threads_;
  const std::shared_ptr<VllmEngineBackend> backend_;
};

inline constexpr char kVllmEngineServiceName[] = "vllm.grpc.engine.VllmEngine";

}  // namespace kvasir::router
