// Servers for measuring the cost of a router: a worker that computes nothing,
// and a proxy that only forwards bytes, with which the router is compared.
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
// Owns: the services, and the server, which ends before the services do.
// Threads: those of gRPC.
class BareServer {
 public:
  virtual ~BareServer() = default;
  // The gRPC target that clients call.
  virtual const std::string& target() const = 0;
};

// The options of a bare server. Limits that are not listed here are those of a
// router's listener. If the port of `listen` is 0, a free port is used.
struct BareServerOptions {
  base::ListenAddress listen;
  // Null: plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  int64_t max_model_len = 8192;
};

// Starts a server that implements kvasir.v1 like a worker of a model named
// `bench`. It sends the tokens of a request at once, each in a separate event,
// with ids 0, 1, 2, ... Errors: those of GrpcServer::Start.
absl::StatusOr<std::unique_ptr<BareServer>> StartScriptedWorker(
    const BareServerOptions& options);

// Starts a proxy that forwards calls of kvasir.v1's Generate to `worker`, and
// forwards the events of the answer one by one, without parsing them. It uses
// as many connections as a router, with the same settings, so it shows what
// gRPC costs without a router. Errors: those of GrpcServer::Start.
absl::StatusOr<std::unique_ptr<BareServer>> StartNullProxy(
    const BareServerOptions& options, const std::string& worker);

}  // namespace kvasir::bench
