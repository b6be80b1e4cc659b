#include "router/testing/facade_server.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/status_matchers.h"

namespace kvasir::router {

void FacadeServerTest::Listen(const std::vector<grpc::Service*>& services) {
  // The router sets the same option for its clients' port.
  base::GrpcServerOptions options;
  options.explain_garbage = true;
  auto server = base::GrpcServer::Start(options, services);
  KVASIR_ASSERT_OK(server);
  server_ = *std::move(server);
  channel_ = grpc::CreateChannel(server_->target(),
                                 grpc::InsecureChannelCredentials());
}

void FacadeServerTest::StopListening() {
  channel_.reset();
  server_->Shutdown(absl::Now());
  server_.reset();
}

void FacadeServerTest::WaitUntilCancelled(const FakeRouter::Request& request) {
  for (int i = 0; i < 2000 && !request.cancelled(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(request.cancelled());
}

}  // namespace kvasir::router
