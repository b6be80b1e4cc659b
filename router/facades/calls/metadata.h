// What a call's metadata says, read off gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "router/facades/calls/identity.h"

namespace kvasir::router {

// Values of a repeated key are joined by commas, as HTTP has it.
std::string MetadataOf(const grpc::ServerContextBase& context, const char* key);

// Names of a certificate, and the hash of a token.
Credentials CredentialsOf(const grpc::ServerContextBase& context);

CallIdentity IdentityOf(const grpc::ServerContextBase& context);

}  // namespace kvasir::router
