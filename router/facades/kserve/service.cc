#include "router/facades/kserve/service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/facades/calls/replies.h"
#include "router/facades/kserve/models.h"
#include "router/facades/kserve/reactors.h"
#include "router/facades/kserve/response.h"

namespace kvasir::router {
namespace {

// Returns the model's status; NOT_FOUND for an unknown name or version.
absl::StatusOr<ModelStatus> FindModel(const RequestRouter& router,
                                      const std::string& name,
                                      const std::string& version) {
  if (!version.empty() && version != kKserveModelVersion) {
    return absl::NotFoundError(absl::StrCat("model '", name, "' has version ",
                                            kKserveModelVersion, ", not '",
                                            version, "'"));
  }
  return router.Model(name);
}

}  // namespace

KserveService::KserveService(const FacadeOptions& options,
                             RequestRouter* router)
    : threads_(options.limits), backend_(std::make_shared<KserveBackend>()) {
  threads_.Fill(options, "kserve", router, backend_.get());
}

absl::Status KserveService::RefuseGarbage(
    const grpc::ServerContextBase& context) const {
  return router::RefuseGarbage(context, *backend_);
}

grpc::ServerUnaryReactor* KserveService::ServerLive(
    grpc::CallbackServerContext* context, const inference::ServerLiveRequest*,
    inference::ServerLiveResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    response->set_live(true);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KserveService::ServerReady(
    grpc::CallbackServerContext* context, const inference::ServerReadyRequest*,
    inference::ServerReadyResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    response->set_ready(backend_->router->Health().ready);
    return absl::OkStatus();
  });
}

// For an unknown model, the answer is "not ready" and not an error, because
// clients poll this call until the model is there.
grpc::ServerUnaryReactor* KserveService::ModelReady(
    grpc::CallbackServerContext* context,
    const inference::ModelReadyRequest* request,
    inference::ModelReadyResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model =
        FindModel(*backend_->router, request->name(), request->version());
    response->set_ready(model.ok() && model->ready);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KserveService::ServerMetadata(
    grpc::CallbackServerContext* context,
    const inference::ServerMetadataRequest*,
    inference::ServerMetadataResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    response->set_name("kvasir");
    response->set_version(backend_->server_version);
    response->add_extensions("model_configuration");
    response->add_extensions("statistics");
    response->add_extensions("parameters");
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KserveService::ModelMetadata(
    grpc::CallbackServerContext* context,
    const inference::ModelMetadataRequest* request,
    inference::ModelMetadataResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model =
        FindModel(*backend_->router, request->name(), request->version());
    if (model.ok()) *response = KserveMetadataOf(*model);
    return model.status();
  });
}

grpc::ServerUnaryReactor* KserveService::ModelConfig(
    grpc::CallbackServerContext* context,
    const inference::ModelConfigRequest* request,
    inference::ModelConfigResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    const auto model =
        FindModel(*backend_->router, request->name(), request->version());
    if (model.ok()) *response->mutable_config() = KserveConfigOf(*model);
    return model.status();
  });
}

grpc::ServerUnaryReactor* KserveService::ModelStatistics(
    grpc::CallbackServerContext* context,
    const inference::ModelStatisticsRequest* request,
    inference::ModelStatisticsResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    std::vector<ModelStatus> models;
    if (request->name().empty()) {
      models = backend_->router->Models();
    } else {
      auto model =
          FindModel(*backend_->router, request->name(), request->version());
      if (!model.ok()) return model.status();
      models.push_back(*std::move(model));
    }
    for (const ModelStatus& model : models) {
      inference::ModelStatistics* statistics = response->add_model_stats();
      *statistics = backend_->statistics.StatisticsOf(model.name);
      statistics->set_name(model.name);
      statistics->set_version(kKserveModelVersion);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KserveService::RepositoryIndex(
    grpc::CallbackServerContext* context,
    const inference::RepositoryIndexRequest* request,
    inference::RepositoryIndexResponse* response) {
  return Answer(context, *backend_, [&](const Caller&) -> absl::Status {
    for (const ModelStatus& model : backend_->router->Models()) {
      if (request->ready() && !model.ready) continue;
      *response->add_models() = KserveIndexOf(model);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* KserveService::ModelInfer(
    grpc::CallbackServerContext* context,
    const inference::ModelInferRequest* request,
    inference::ModelInferResponse* response) {
  return new KserveUnaryReactor(backend_, threads_.streams(), context, request,
                                response);
}

grpc::ServerBidiReactor<inference::ModelInferRequest,
                        inference::ModelStreamInferResponse>*
KserveService::ModelStreamInfer(grpc::CallbackServerContext* context) {
  return new KserveStreamReactor(backend_, threads_.streams(), context);
}

}  // namespace kvasir::router
