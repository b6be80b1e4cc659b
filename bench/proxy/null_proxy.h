// Two servers to measure what a router costs: a worker that computes nothing,
// and a proxy that only passes bytes on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/grpc_server.h"

namespace kvasir::bench {

// A running server with what it serves.
//
// Owns: the services, the server before which they end.
// Threads: those of gRPC.
class BareServer {
 public:
  virtual ~BareServer() = default;
  // The address that a client connects to.
  virtual const std::string& target() const = 0;
};

// Limits are those of a router's listener; a port is picked where it is 0.
struct BareServerOptions {
  base::ListenAddress listen;
  // Null: plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  int64_t max_model_len = 8192;
};

// Speaks kvasir.v1 as a worker does. A request's tokens, as many as it asks
// for, come at once, each in an event of its own; their ids count from 0.
// It is `bench` by name. Errors: GrpcServer::Start's.
absl::StatusOr<std::unique_ptr<BareServer>> StartScriptedWorker(
    const BareServerOptions& options);

// Passes Generate of kvasir.v1 on to `worker` and its events back, one by one,
// as bytes that it does not read, over as many connections as a router has and
// in its settings: what gRPC costs by itself. Errors: GrpcServer::Start's.
absl::StatusOr<std::unique_ptr<BareServer>> StartNullProxy(
    const BareServerOptions& options, const std::string& worker);

}  // namespace kvasir::bench
