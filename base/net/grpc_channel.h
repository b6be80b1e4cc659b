// Creates gRPC channels for clients.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvasir::base {

// Returns a channel that connects to `target` directly, and never through the
// proxy that the environment sets for web traffic (http_proxy). Null
// credentials: plain text. The channel connects when it is first used.
std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace kvasir::base
