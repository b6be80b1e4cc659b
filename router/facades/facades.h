// All facades of this build.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"

namespace kvasir::router {

using Facades = std::vector<std::unique_ptr<Facade>>;

// One of each protocol. The router outlives them.
Facades NewFacades(const FacadeOptions& options, RequestRouter* router);

std::vector<grpc::Service*> ServicesOf(const Facades& facades);
std::vector<std::string> ServiceNamesOf(const Facades& facades);

// The facade of a call's method ("/package.Service/Method"); null: none has it.
const Facade* FacadeOfMethod(const Facades& facades, const std::string& method);

}  // namespace kvasir::router
