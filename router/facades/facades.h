// All facades of this build.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"

namespace kvasir::router {

using Facades = std::vector<std::unique_ptr<Facade>>;

// Creates one of each protocol. The router must outlive them.
Facades NewFacades(const FacadeOptions& options, RequestRouter* router);

std::vector<grpc::Service*> ServicesOf(const Facades& facades);
std::vector<std::string> ServiceNamesOf(const Facades& facades);

// Returns the facade of a call's method ("/package.Service/Method"), or null.
const Facade* FacadeOfMethod(const Facades& facades, const std::string& method);

}  // namespace kvasir::router
