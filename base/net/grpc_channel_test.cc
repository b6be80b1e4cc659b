#include "base/net/grpc_channel.h"

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/net/grpc_server.h"
#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

bool Connects(const std::shared_ptr<grpc::Channel>& channel,
              absl::Duration patience) {
  return channel->WaitForConnected(absl::ToChronoTime(absl::Now() + patience));
}

// Regression test: if a proxy was set in a command's environment, the command
// once sent all its prompts through that proxy.
TEST(GrpcChannelTest, AProxyInTheEnvironmentVariablesIsNotUsed) {
  const auto server = GrpcServer::Start({}, {});
  KVASIR_ASSERT_OK(server.status());
  // Set proxies at an address where no process listens.
  for (const char* name : {"http_proxy", "grpc_proxy", "https_proxy"}) {
    setenv(name, "http://127.0.0.1:1", 1);
  }
  EXPECT_TRUE(Connects(NewGrpcChannel((*server)->target(), nullptr),
                       absl::Seconds(30)));
  const auto by_proxy = grpc::CreateChannel((*server)->target(),
                                            grpc::InsecureChannelCredentials());
  EXPECT_FALSE(Connects(by_proxy, absl::Milliseconds(200)))
      << "gRPC no longer uses proxies by default, so this test proves nothing";
  for (const char* name : {"http_proxy", "grpc_proxy", "https_proxy"}) {
    unsetenv(name);
  }
}

}  // namespace
}  // namespace kvasir::base
