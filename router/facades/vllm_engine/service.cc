#include "router/facades/vllm_engine/service.h"

#include <utility>

#include "router/facades/calls/only_model.h"
#include "router/facades/calls/replies.h"
#include "router/facades/vllm_engine/models.h"
#include "router/facades/vllm_engine/reactors.h"

namespace kvasir::router {
namespace {

namespace engine = vllm::grpc::engine;
namespace common = smg::grpc::common;

absl::Status NotBuilt(const char* rpc) {
  return RpcNotBuilt(engine::VllmEngine::service_full_name(), rpc);
}

}  // namespace

VllmEngineService::VllmEngineService(const FacadeOptions& options,
                                     RequestRouter* router)
    : threads_(options.limits),
      backend_(std::make_shared<VllmEngineBackend>()) {
  threads_.Fill(options, "vllm", router, backend_.get());
  if (!options.tokenizer_folder.empty()) {
    backend_->bundle = std::make_shared<TokenizerBundle>(
        options.tokenizer_folder, options.make_tokenizer_files);
  }
  backend_->share_tokenizer = options.share_tokenizer;
  backend_->start = backend_->clock->Now();
}

absl::Status VllmEngineService::RefuseGarbage(
    const grpc::ServerContextBase& context) const {
  return router::RefuseGarbage(context, *backend_);
}

grpc::ServerWriteReactor<engine::GenerateResponse>* VllmEngineService::Generate(
    grpc::CallbackServerContext* context,
    const engine::GenerateRequest* request) {
  return NewVllmGenerateReactor(backend_, threads_.streams(), context, request);
}

grpc::ServerUnaryReactor* VllmEngineService::Abort(
    grpc::CallbackServerContext* context, const engine::AbortRequest* request,
    engine::AbortResponse*) {
  return Answer(context, *backend_, [&](const Caller& caller) -> absl::Status {
    return AbortRequests(caller, *backend_, request->request_ids());
  });
}

grpc::ServerUnaryReactor* VllmEngineService::HealthCheck(
    grpc::CallbackServerContext* context, const engine::HealthCheckRequest*,
    engine::HealthCheckResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    *response = VllmHealthOf(*backend_->router);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* VllmEngineService::GetModelInfo(
    grpc::CallbackServerContext* context, const engine::GetModelInfoRequest*,
    engine::GetModelInfoResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model = OnlyModel(*backend_->router);
    if (!model.ok()) return model.status();
    auto info = VllmModelInfoOf(*model, backend_->serves_tokenizer());
    if (info.ok()) *response = *std::move(info);
    return info.status();
  });
}

grpc::ServerUnaryReactor* VllmEngineService::GetServerInfo(
    grpc::CallbackServerContext* context, const engine::GetServerInfoRequest*,
    engine::GetServerInfoResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model = OnlyModel(*backend_->router);
    if (!model.ok()) return model.status();
    *response = VllmServerInfoOf(*model);
    response->set_uptime_seconds(
        absl::ToDoubleSeconds(backend_->clock->Now() - backend_->start));
    response->set_last_receive_timestamp(
        static_cast<double>(backend_->last_request_unix_micros.load()) * 1e-6);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* VllmEngineService::GetLoads(
    grpc::CallbackServerContext* context,
    const engine::GetLoadsRequest* request,
    engine::GetLoadsResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model = OnlyModel(*backend_->router);
    if (!model.ok()) return model.status();
    response->set_timestamp(absl::FormatTime(
        absl::RFC3339_full, backend_->clock->Now(), absl::UTCTimeZone()));
    response->set_version(backend_->server_version);
    if (request->dp_rank() == 0) *response->add_loads() = VllmLoadOf(*model);
    response->set_dp_rank_count(response->loads_size());
    return absl::OkStatus();
  });
}

grpc::ServerWriteReactor<common::GetTokenizerChunk>*
VllmEngineService::GetTokenizer(grpc::CallbackServerContext* context,
                                const common::GetTokenizerRequest*) {
  using Ended = EndedStream<common::GetTokenizerChunk>;
  const auto caller = AskCaller(*context, *backend_);
  if (!caller.ok()) return new Ended(caller.status());
  if (backend_->bundle == nullptr) {
    return new Ended(absl::NotFoundError("this server has no tokenizer"));
  }
  if (!backend_->serves_tokenizer()) {
    return new Ended(absl::PermissionDeniedError(
        "this server does not give its tokenizer's files to clients, unless "
        "its operator shares them (--share-tokenizer on)"));
  }
  return new VllmTokenizerReactor(backend_);
}

grpc::ServerWriteReactor<common::KvEventBatch>*
VllmEngineService::SubscribeKvEvents(grpc::CallbackServerContext* context,
                                     const common::SubscribeKvEventsRequest*) {
  const auto caller = AskCaller(*context, *backend_);
  return new EndedStream<common::KvEventBatch>(
      caller.ok() ? NotBuilt("SubscribeKvEvents") : caller.status());
}

}  // namespace kvasir::router
