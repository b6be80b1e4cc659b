// Creates gRPC channels for clients.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvasir::base {

// Returns a channel to `target`. It connects directly, even if the environment
// names a proxy for web traffic (http_proxy), and only when it is first used.
// If `credentials` are null, it uses plain text.
std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace kvasir::base
