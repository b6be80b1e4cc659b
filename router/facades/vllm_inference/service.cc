#include "router/facades/vllm_inference/service.h"

#include <utility>

#include "base/status_macros.h"
#include "router/facades/calls/fields.h"
#include "router/facades/calls/generate_reactors.h"
#include "router/facades/calls/only_model.h"
#include "router/facades/calls/replies.h"
#include "router/facades/vllm_inference/answer.h"
#include "router/facades/vllm_inference/models.h"
#include "router/facades/vllm_inference/prepare.h"
#include "router/facades/vllm_inference/request.h"

namespace kvasir::router {
namespace {

using Call = SingleCall<VllmInferenceAnswer>;
using Backend = std::shared_ptr<FacadeBackend>;

absl::StatusOr<Call::Prepare> ReadRequest(const Backend& backend,
                                          const vllm::GenerateRequest& message,
                                          bool streaming,
                                          absl::StatusOr<ModelStatus> model) {
  KVASIR_RETURN_IF_ERROR(model.status());
  KVASIR_RETURN_IF_ERROR(CheckVllmRequestId(message.request_id()));
  KVASIR_ASSIGN_OR_RETURN(VllmInferenceRequest request,
                          ParseVllmInferenceRequest(message, streaming));
  return [backend, request = std::move(request),
          info = std::move(model->info)
                     .value_or(kvasir::v1::WorkerInfo())]() mutable {
    return PrepareVllmInferenceCall(std::move(request), info, backend->codec,
                                    backend->limits);
  };
}

Call::Asked Read(const Backend& backend, const vllm::GenerateRequest& message,
                 bool streaming) {
  absl::StatusOr<ModelStatus> model =
      message.model().empty() ? OnlyModel(*backend->router)
                              : backend->router->Model(message.model());
  Call::Asked asked{
      .model = model.ok() ? model->name : message.model(),
      .n = message.sampling().num_sequences(),
      .prepare = ReadRequest(backend, message, streaming, std::move(model))};
  // Do not keep an invalid id, because the ids of refused requests are logged.
  if (CheckVllmRequestId(message.request_id()).ok()) {
    asked.id = message.request_id();
  }
  return asked;
}

GenerateCall<VllmInferenceAnswer> NewGenerate(
    const Backend& backend, const vllm::GenerateRequest& message,
    const FacadeThreads& threads) {
  return {.backend = backend,
          .message_bytes = message.SpaceUsedLong(),
          .runner = threads.streams()};
}

}  // namespace

VllmInferenceService::VllmInferenceService(const FacadeOptions& options,
                                           RequestRouter* router)
    : threads_(options.limits),
      backend_(std::make_shared<FacadeBackend>()),
      control_(backend_) {
  threads_.Fill(options, "vllm_inference", router, backend_.get());
}

std::vector<grpc::Service*> VllmInferenceService::services() {
  return {this, &control_};
}

std::vector<std::string> VllmInferenceService::names() const {
  return {vllm::Inference::service_full_name(),
          vllm::Control::service_full_name()};
}

absl::Status VllmInferenceService::RefuseGarbage(
    const grpc::ServerContextBase& context) const {
  return router::RefuseGarbage(context, *backend_);
}

::grpc::ServerUnaryReactor* VllmInferenceService::Generate(
    ::grpc::CallbackServerContext* context,
    const vllm::GenerateRequest* request, vllm::GenerateResponse* response) {
  return new GenerateUnaryReactor<VllmInferenceAnswer>(
      NewGenerate(backend_, *request, threads_), context, response,
      [backend = backend_, request] {
        return Read(backend, *request, /*streaming=*/false);
      });
}

::grpc::ServerWriteReactor<vllm::GenerateResponse>*
VllmInferenceService::GenerateStream(::grpc::CallbackServerContext* context,
                                     const vllm::GenerateRequest* request) {
  return new GenerateStreamReactor<VllmInferenceAnswer>(
      NewGenerate(backend_, *request, threads_), context,
      [backend = backend_, request] {
        return Read(backend, *request, /*streaming=*/true);
      });
}

::grpc::ServerUnaryReactor* VllmControlService::GetServerInfo(
    ::grpc::CallbackServerContext* context, const vllm::GetServerInfoRequest*,
    vllm::ServerInfo* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model = OnlyModel(*backend_->router);
    if (!model.ok()) return model.status();
    auto info = ControlServerInfoOf(*model, backend_->server_version);
    if (info.ok()) *response = *std::move(info);
    return info.status();
  });
}

::grpc::ServerUnaryReactor* VllmControlService::GetModelInfo(
    ::grpc::CallbackServerContext* context, const vllm::GetModelInfoRequest*,
    vllm::ModelInfo* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model = OnlyModel(*backend_->router);
    if (!model.ok()) return model.status();
    *response = ControlModelInfoOf(*model, backend_->router->Models(),
                                   backend_->codec != nullptr);
    return absl::OkStatus();
  });
}

::grpc::ServerUnaryReactor* VllmControlService::Abort(
    ::grpc::CallbackServerContext* context, const vllm::AbortRequest* request,
    vllm::AbortResponse*) {
  return Answer(context, *backend_, [&](const Caller& caller) -> absl::Status {
    return AbortRequests(caller, *backend_, request->request_ids());
  });
}

::grpc::ServerUnaryReactor* VllmControlService::GetKvEventSources(
    ::grpc::CallbackServerContext* context,
    const vllm::GetKvEventSourcesRequest*, vllm::GetKvEventSourcesResponse*) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    return absl::OkStatus();
  });
}

}  // namespace kvasir::router
