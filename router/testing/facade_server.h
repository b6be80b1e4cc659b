// A facade's services at a real listener, with a scripted router.
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
  // The services must outlive StopListening.
  void Listen(const std::vector<grpc::Service*>& services);
  void StopListening();
  static void WaitUntilCancelled(const FakeRouter::Request& request);

  FakeRouter router_;
  std::unique_ptr<base::GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace kvasir::router
