// Creates the facades of all wire protocols.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "router/base/canonical.h"
#include "router/facades/calls/facade.h"

namespace kvasir::router {

using Facades = std::vector<std::unique_ptr<Facade>>;

// Creates a facade for each protocol. The router must outlive the facades.
Facades NewFacades(const FacadeOptions& options, RequestRouter* router);

std::vector<grpc::Service*> ServicesOf(const Facades& facades);
std::vector<std::string> ServiceNamesOf(const Facades& facades);

// Returns the facade that serves a method ("/package.Service/Method"), or null.
const Facade* FacadeOfMethod(const Facades& facades, const std::string& method);

}  // namespace kvasir::router
