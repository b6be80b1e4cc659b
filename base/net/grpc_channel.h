// A client's way to a server.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

namespace kvasir::base {

// A channel that dials `target` and nothing else: gRPC would send it to the
// proxy of the environment (http_proxy), which is for the web. Null
// credentials: plain text. Connects when first used.
std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

}  // namespace kvasir::base
