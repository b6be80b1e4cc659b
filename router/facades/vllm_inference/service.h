// The facade that serves vllm.Inference and vllm.Control, the protocol of
// vLLM's own gRPC server, for vllm-router and other clients. Input and output
// are text or token ids. Reactors only convert messages and post tasks;
// SingleCall contains the logic.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/vllm/control.grpc.pb.h"
#include "proto/vllm/inference.grpc.pb.h"
#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"
#include "router/facades/calls/replies.h"

namespace kvasir::router {

// The service vllm.Control. Its Abort ends requests of vllm.Inference.
// Threads: its methods may be called from any thread.
// Errors: gRPC statuses, as the wire protocol defines them. An RPC that is not
// implemented answers UNIMPLEMENTED; the text contains its name.
class VllmControlService final : public vllm::Control::CallbackService {
 public:
  explicit VllmControlService(std::shared_ptr<const FacadeBackend> backend)
      : backend_(std::move(backend)) {}

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
  // Answers with an empty list, because Kvasir sends no KV events.
  ::grpc::ServerUnaryReactor* GetKvEventSources(
      ::grpc::CallbackServerContext* context,
      const vllm::GetKvEventSourcesRequest* request,
      vllm::GetKvEventSourcesResponse* response) override;

  using Nothing = vllm::NotBuilt;
  KVASIR_RPC_NOT_BUILT(vllm::Control, Shutdown, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, LoadLora, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, UnloadLora, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, ListLoras, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, PauseGeneration, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, ResumeGeneration, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, IsPaused, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, Sleep, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, WakeUp, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, IsSleeping, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, InitWeightTransferEngine, Nothing,
                       Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, StartWeightUpdate, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, StartDraftWeightUpdate, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, UpdateWeights, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, FinishWeightUpdate, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, UpdateWeightVersion, Nothing, Nothing)
  KVASIR_RPC_NOT_BUILT(vllm::Control, GetWeightVersion, Nothing, Nothing)

 private:
  const std::shared_ptr<const FacadeBackend> backend_;
};

// The service vllm.Inference and the facade of both services.
// Owns: the tokenizer's and the streams' threads, and the service vllm.Control.
// Threads: its methods may be called from any thread.
// Errors: gRPC statuses, as the wire protocol defines them.
class VllmInferenceService final : public vllm::Inference::CallbackService,
                                   public Facade {
 public:
  VllmInferenceService(const FacadeOptions& options, RequestRouter* router);

  std::vector<grpc::Service*> services() override;
  std::vector<std::string> names() const override;
  absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const override;

  ::grpc::ServerUnaryReactor* Generate(
      ::grpc::CallbackServerContext* context,
      const vllm::GenerateRequest* request,
      vllm::GenerateResponse* response) override;
  ::grpc::ServerWriteReactor<vllm::GenerateResponse>* GenerateStream(
      ::grpc::CallbackServerContext* context,
      const vllm::GenerateRequest* request) override;

 private:
  const FacadeThreads threads_;
  const std::shared_ptr<FacadeBackend> backend_;
  VllmControlService control_;
};

}  // namespace kvasir::router
