// The facades vllm.Inference and vllm.Control: text or token ids in, text and
// token ids out, for vllm-router and what else routes to vLLM's own gRPC
// servers. Thin: reactors convert and post, SingleCall decides.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>

#include "proto/vllm/control.grpc.pb.h"
#include "proto/vllm/inference.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/service_parts.h"

namespace kvasir::router {

struct VllmInferenceServiceOptions : FacadeOptions {
  FacadeLimits limits;
};

// Threads: any thread; constant but for what synchronizes itself.
struct VllmInferenceBackend : FacadeBackend {
  FacadeLimits limits;
};

// Register it with a server, and VllmControlService beside it; grpc.health.v1
// names it kVllmInferenceServiceName. Outlives the server (all calls have
// ended). The router outlives it.
//
// Owns: the tokenizer's and the streams' threads.
// Threads: any thread. Errors: as in the wire protocol.
class VllmInferenceService final : public vllm::Inference::CallbackService {
 public:
  VllmInferenceService(VllmInferenceServiceOptions options,
                       RequestRouter* router);
  ~VllmInferenceService() override;

  // What all of its calls share; Control's Abort looks in it.
  std::shared_ptr<const VllmInferenceBackend> backend() const {
    return backend_;
  }

  ::grpc::ServerUnaryReactor* Generate(
      ::grpc::CallbackServerContext* context,
      const vllm::GenerateRequest* request,
      vllm::GenerateResponse* response) override;
  ::grpc::ServerWriteReactor<vllm::GenerateResponse>* GenerateStream(
      ::grpc::CallbackServerContext* context,
      const vllm::GenerateRequest* request) override;

 private:
  const FacadeThreads threads_;
  const std::shared_ptr<VllmInferenceBackend> backend_;
};

// Threads: any thread. Errors: as in the wire protocol; an RPC that is not
// built answers UNIMPLEMENTED with its name.
class VllmControlService final : public vllm::Control::CallbackService {
 public:
  VllmControlService(std::shared_ptr<const VllmInferenceBackend> backend,
                     std::string server_version)
      : backend_(std::move(backend)),
        server_version_(std::move(server_version)) {}

  ::grpc::ServerUnaryReactor* GetServerInfo(
      ::grpc::CallbackServerContext* context,
      const vllm::GetServerInfoRequest* request,
      vllm::ServerInfo* response) override;
  ::grpc::ServerUnaryReactor* GetModelInfo(
      ::grpc::CallbackServerContext* context,
      const vllm::GetModelInfoRequest* request,
      vllm::ModelInfo* response) override;
  ::grpc::ServerUnaryReactor* Abort(::grpc::CallbackServerContext* context,
                                    const vllm::AbortRequest* request,
                                    vllm::AbortResponse* response) override;
  // None: an empty list.
  ::grpc::ServerUnaryReactor* GetKvEventSources(
      ::grpc::CallbackServerContext* context,
      const vllm::GetKvEventSourcesRequest* request,
      vllm::GetKvEventSourcesResponse* response) override;

  using Context = ::grpc::CallbackServerContext;
  using Reactor = ::grpc::ServerUnaryReactor;
  using Nothing = vllm::NotBuilt;
  // Not built.
  Reactor* Shutdown(Context* context, const Nothing* request,
                    Nothing* response) override;
  Reactor* LoadLora(Context* context, const Nothing* request,
                    Nothing* response) override;
  Reactor* UnloadLora(Context* context, const Nothing* request,
                      Nothing* response) override;
  Reactor* ListLoras(Context* context, const Nothing* request,
                     Nothing* response) override;
  Reactor* PauseGeneration(Context* context, const Nothing* request,
                           Nothing* response) override;
  Reactor* ResumeGeneration(Context* context, const Nothing* request,
                            Nothing* response) override;
  Reactor* IsPaused(Context* context, const Nothing* request,
                    Nothing* response) override;
  Reactor* Sleep(Context* context, const Nothing* request,
                 Nothing* response) override;
  Reactor* WakeUp(Context* context, const Nothing* request,
                  Nothing* response) override;
  Reactor* IsSleeping(Context* context, const Nothing* request,
                      Nothing* response) override;
  Reactor* InitWeightTransferEngine(Context* context, const Nothing* request,
                                    Nothing* response) override;
  Reactor* StartWeightUpdate(Context* context, const Nothing* request,
                             Nothing* response) override;
  Reactor* StartDraftWeightUpdate(Context* context, const Nothing* request,
                                  Nothing* response) override;
  Reactor* UpdateWeights(Context* context, const Nothing* request,
                         Nothing* response) override;
  Reactor* FinishWeightUpdate(Context* context, const Nothing* request,
                              Nothing* response) override;
  Reactor* UpdateWeightVersion(Context* context, const Nothing* request,
                               Nothing* response) override;
  Reactor* GetWeightVersion(Context* context, const Nothing* request,
                            Nothing* response) override;

 private:
  const std::shared_ptr<const VllmInferenceBackend> backend_;
  const std::string server_version_;
};

inline constexpr char kVllmInferenceServiceName[] = "vllm.Inference";
inline constexpr char kVllmControlServiceName[] = "vllm.Control";

}  // namespace kvasir::router
