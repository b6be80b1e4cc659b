// gRPC's side of Generate and GetTokenizer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "proto/vllm/common.pb.h"
#include "proto/vllm/engine.pb.h"
#include "router/facades/calls/single_call.h"
#include "router/facades/text/tokenizer_bundle.h"
#include "router/facades/vllm_engine/answer.h"
#include "router/facades/vllm_engine/backend.h"

namespace kvasir::router {

// Deletes itself in OnDone, which gRPC runs once End has been called and every
// reaction has returned.
// Threads: reactions on gRPC's threads, the writer's methods on the strand;
// they meet only inside gRPC.
class VllmGenerateReactor final
    : public grpc::ServerWriteReactor<vllm::grpc::engine::GenerateResponse>,
      public CallWriter<vllm::grpc::engine::GenerateResponse> {
 public:
  // `request` lives until OnDone.
  VllmGenerateReactor(std::shared_ptr<VllmEngineBackend> backend,
                      std::shared_ptr<TaskRunner> runner,
                      grpc::CallbackServerContext* context,
                      const vllm::grpc::engine::GenerateRequest* request);

  void OnWriteDone(bool ok) override { call_->OnWritten(ok); }
  void OnCancel() override { call_->OnCancelled(); }
  void OnDone() override { delete this; }

  void Write(vllm::grpc::engine::GenerateResponse response) override;
  void Reset() override { context_->TryCancel(); }
  void End(const absl::Status& status) override;

 private:
  grpc::CallbackServerContext* const context_;
  const ClientCall open_;
  const std::shared_ptr<SingleCall<VllmEngineAnswer>> call_;
  // Between StartWrite and OnWriteDone gRPC's.
  vllm::grpc::engine::GenerateResponse response_;
};

// The archive, chunk by chunk. Deletes itself as the other.
class VllmTokenizerReactor final
    : public grpc::ServerWriteReactor<smg::grpc::common::GetTokenizerChunk> {
 public:
  explicit VllmTokenizerReactor(
      const std::shared_ptr<VllmEngineBackend>& backend);

  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  void WriteNext();

  const ClientCall open_;
  std::shared_ptr<const TokenizerArchive> archive_;
  size_t num_written_bytes_ = 0;
  smg::grpc::common::GetTokenizerChunk chunk_;
};

}  // namespace kvasir::router
