// Test fixture: serves a facade's gRPC services on a real port, with a
// scripted router.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

#include "base/net/grpc_server.h"
#include "gtest/gtest.h"
#include "router/testing/fake_router.h"

namespace kvasir::router {

class FacadeServerTest : public ::testing::Test {
 protected:
  // Serves `services`, which must exist until StopListening has returned.
  void Listen(const std::vector<grpc::Service*>& services);
  void StopListening();
  static void WaitUntilCancelled(const FakeRouter::Request& request);

  FakeRouter router_;
  std::unique_ptr<base::GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace kvasir::router
