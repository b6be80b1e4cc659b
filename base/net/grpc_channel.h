// Channels of clients.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvasir::base {

// Returns a channel that dials `target` itself: gRPC would use the
// environment's proxy (http_proxy), which is for the web. Null credentials:
// plain text. Connects when it is first used.
std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace kvasir::base
