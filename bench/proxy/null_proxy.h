// The programs on both sides of a router whose cost is measured: a worker that
// computes nothing, and a proxy that only passes bytes on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/grpc_server.h"

namespace kvasir::bench {

// A running server with its services.
//
// Owns: the services and the server, which ends first.
// Threads: those of gRPC.
class BareServer {
 public:
  virtual ~BareServer() = default;
  // The target of clients.
  virtual const std::string& target() const = 0;
};

// Limits are those of a router's listener. Port 0: a free port.
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
