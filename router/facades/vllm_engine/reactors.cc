#include "router/facades/vllm_engine/reactors.h"

#include <algorithm>
#include <utility>

#include "base/net/grpc_status.h"
#include "base/status_macros.h"
#include "router/facades/calls/fields.h"
#include "router/facades/calls/only_model.h"
#include "router/facades/vllm_engine/prepare.h"
#include "router/facades/vllm_engine/request.h"

namespace kvasir::router {
namespace {

using Call = SingleCall<VllmEngineAnswer>;
using vllm::grpc::engine::GenerateRequest;

// The size of a chunk of the archive. It is small, because each client that
// does not read keeps one chunk in memory.
constexpr size_t kChunkBytes = 256 << 10;

absl::StatusOr<Call::Prepare> ReadRequest(
    const std::shared_ptr<VllmEngineBackend>& backend,
    const GenerateRequest& message, absl::StatusOr<ModelStatus> model) {
  KVASIR_RETURN_IF_ERROR(model.status());
  KVASIR_RETURN_IF_ERROR(CheckVllmRequestId(message.request_id()));
  KVASIR_ASSIGN_OR_RETURN(VllmEngineRequest request,
                          ParseVllmEngineRequest(message));
  return [backend, request = std::move(request),
          info = std::move(model->info)
                     .value_or(kvasir::v1::WorkerInfo())]() mutable {
    return PrepareVllmEngineCall(std::move(request), info, backend->codec,
                                 backend->limits);
  };
}

Call::Asked Read(const std::shared_ptr<VllmEngineBackend>& backend,
                 const GenerateRequest& message) {
  absl::StatusOr<ModelStatus> model = OnlyModel(*backend->router);
  Call::Asked asked{.model = model.ok() ? model->name : "",
                    .n = message.sampling_params().n(),
                    .prepare = ReadRequest(backend, message, std::move(model))};
  // Do not keep an invalid id, because the ids of refused requests are logged.
  if (CheckVllmRequestId(message.request_id()).ok()) {
    asked.id = message.request_id();
  }
  return asked;
}

}  // namespace

VllmGenerateReactor* NewVllmGenerateReactor(
    std::shared_ptr<VllmEngineBackend> backend,
    std::shared_ptr<TaskRunner> runner, grpc::CallbackServerContext* context,
    const GenerateRequest* request) {
  backend->last_request_unix_micros = absl::ToUnixMicros(backend->clock->Now());
  GenerateCall<VllmEngineAnswer> call{.backend = backend,
                                      .message_bytes = request->SpaceUsedLong(),
                                      .runner = std::move(runner)};
  return new VllmGenerateReactor(std::move(call), context,
                                 [backend = std::move(backend), request] {
                                   return Read(backend, *request);
                                 });
}

// The tokenizer's threads create the archive, because gRPC has only a few
// threads. The task may use this reactor, because gRPC keeps it until Finish
// has been called.
VllmTokenizerReactor::VllmTokenizerReactor(
    const std::shared_ptr<VllmEngineBackend>& backend)
    : open_(backend->calls) {
  const bool queued =
      backend->tokenizer->Post([this, bundle = backend->bundle] {
        auto archive = bundle->Get();
        if (!archive.ok()) return Finish(base::ToGrpcStatus(archive.status()));
        archive_ = *std::move(archive);
        WriteNext();
      });
  if (!queued) Finish(base::ToGrpcStatus(TokenizerIsFull(backend->limits)));
}

void VllmTokenizerReactor::WriteNext() {
  const std::string& zip = archive_->zip;
  const size_t size = std::min(kChunkBytes, zip.size() - num_written_bytes_);
  chunk_.set_data(zip.substr(num_written_bytes_, size));
  num_written_bytes_ += size;
  if (num_written_bytes_ == zip.size()) chunk_.set_sha256(archive_->sha256);
  StartWrite(&chunk_);
}

void VllmTokenizerReactor::OnWriteDone(bool ok) {
  if (!ok || num_written_bytes_ == archive_->zip.size()) {
    // Either all chunks have been written, or the client is gone and does not
    // see the status.
    Finish(grpc::Status::OK);
    return;
  }
  WriteNext();
}

}  // namespace kvasir::router
