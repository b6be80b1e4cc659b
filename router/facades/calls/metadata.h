// Reads the metadata and credentials of a gRPC call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "router/facades/calls/identity.h"

namespace kvasir::router {

// Returns the value of a metadata key. The values of a repeated key are joined
// by commas, as in HTTP.
std::string MetadataOf(const grpc::ServerContextBase& context, const char* key);

// Returns the names in the client's certificate and the hash of its token.
Credentials CredentialsOf(const grpc::ServerContextBase& context);

CallIdentity IdentityOf(const grpc::ServerContextBase& context);

}  // namespace kvasir::router
