// Reads a call's metadata from gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "router/facades/calls/identity.h"

namespace kvasir::router {

// Values of a repeated key are joined by commas, as in HTTP.
std::string MetadataOf(const grpc::ServerContextBase& context, const char* key);

// The names of the certificate, and the hash of the token.
Credentials CredentialsOf(const grpc::ServerContextBase& context);

CallIdentity IdentityOf(const grpc::ServerContextBase& context);

}  // namespace kvasir::router
