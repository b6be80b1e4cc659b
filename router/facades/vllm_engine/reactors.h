// The gRPC reactors of Generate and GetTokenizer.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "proto/vllm/common.pb.h"
#include "proto/vllm/engine.pb.h"
#include "router/facades/calls/generate_reactors.h"
#include "router/facades/text/tokenizer_bundle.h"
#include "router/facades/vllm_engine/answer.h"
#include "router/facades/vllm_engine/backend.h"

namespace kvasir::router {

using VllmGenerateReactor = GenerateStreamReactor<VllmEngineAnswer>;

// Creates the reactor of a Generate call. `request` must exist until the
// reactor's OnDone.
VllmGenerateReactor* NewVllmGenerateReactor(
    std::shared_ptr<VllmEngineBackend> backend,
    std::shared_ptr<TaskRunner> runner, grpc::CallbackServerContext* context,
    const vllm::grpc::engine::GenerateRequest* request);

// The reactor of a GetTokenizer call. It sends the archive in chunks, and
// deletes itself in OnDone.
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
