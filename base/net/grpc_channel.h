// Creates gRPC channels for clients.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvasir::base {

// Returns a channel that connects to `target` directly, because gRPC would by
// default use the environment's proxy (http_proxy), which is meant for web
// traffic. Null credentials: plain text. The channel connects when it is first
// used.
std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace kvasir::base
