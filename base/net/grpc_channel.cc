#include "base/net/grpc_channel.h"

#include <grpcpp/create_channel.h>

namespace kvasir::base {

std::shared_ptr<grpc::Channel> NewGrpcChannel(
    const std::string& target,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(
      target,
      credentials == nullptr ? grpc::InsecureChannelCredentials() : credentials,
      arguments);
}

}  // namespace kvasir::base
