#include "router/facades/facades.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "router/facades/kserve/service.h"
#include "router/facades/vllm_engine/service.h"
#include "router/facades/vllm_inference/service.h"

namespace kvasir::router {
namespace {

template <typename Service>
std::unique_ptr<Facade> New(const FacadeOptions& options,
                            RequestRouter* router) {
  return std::make_unique<Service>(options, router);
}

// The constructors of all facades: one line for each protocol.
constexpr std::unique_ptr<Facade> (*kFacades[])(const FacadeOptions&,
                                                RequestRouter*) = {
    &New<KserveService>,
    &New<VllmEngineService>,
    &New<VllmInferenceService>,
};

}  // namespace

Facades NewFacades(const FacadeOptions& options, RequestRouter* router) {
  Facades facades;
  for (const auto& create : kFacades) {
    facades.push_back(create(options, router));
  }
  return facades;
}

std::vector<grpc::Service*> ServicesOf(const Facades& facades) {
  std::vector<grpc::Service*> services;
  for (const auto& facade : facades) {
    for (grpc::Service* service : facade->services()) {
      services.push_back(service);
    }
  }
  return services;
}

std::vector<std::string> ServiceNamesOf(const Facades& facades) {
  std::vector<std::string> names;
  for (const auto& facade : facades) {
    for (std::string& name : facade->names()) names.push_back(std::move(name));
  }
  return names;
}

const Facade* FacadeOfMethod(const Facades& facades,
                             const std::string& method) {
  for (const auto& facade : facades) {
    for (const std::string& name : facade->names()) {
      if (absl::StartsWith(method, absl::StrCat("/", name, "/"))) {
        return facade.get();
      }
    }
  }
  return nullptr;
}

}  // namespace kvasir::router
