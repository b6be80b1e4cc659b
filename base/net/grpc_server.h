// A gRPC listener with every limit set: one way to start a server for worker,
// router and admin ports alike.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvasir::base {

struct ListenAddress {
  // Not empty: a Unix socket at this path; host and port are ignored.
  std::string unix_path;
  // An IPv4 or IPv6 address, or a name.
  std::string host = "127.0.0.1";
  // 0: any free port; GrpcServer::port() says which.
  int port = 0;
  // Named in errors: "choose another with --port".
  std::string flag = "--port";
  std::string host_flag = "--host";
};

struct GrpcServerOptions {
  ListenAddress listen;
  // Null: plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  int64_t max_receive_message_bytes = 4 << 20;
  // Per connection. A frontend multiplexes all its requests over a few.
  int max_concurrent_streams = 4096;
  int max_metadata_bytes = 16 << 10;
  absl::Duration handshake_timeout = absl::Seconds(10);
  // A peer that pings more often on an idle connection is sent away after
  // `max_ping_strikes` of them; 0 strikes: never (allow-listed peers only).
  absl::Duration min_ping_interval = absl::Seconds(10);
  int max_ping_strikes = 2;
  // A connection older than this is told to go, so that clients spread anew
  // over replaced and added servers; calls that run on it end in their own
  // time. Infinite: connections live as long as their clients like.
  absl::Duration max_connection_age = absl::Hours(1);
  // Bytes that the transport may buffer for all connections together.
  int64_t transport_quota_bytes = 256 << 20;
  bool health_service = true;
};

// What prompts of max_model_len need: 8 bytes a token (ids as text-era clients
// send them) and 1 MiB for everything else.
int64_t MaxMessageBytesFor(int64_t max_model_len_tokens);

// Owns the running server. Registered services must outlive it.
// Threads: any thread.
class GrpcServer {
 public:
  // FAILED_PRECONDITION when the address cannot be bound: taken, not ours, no
  // such host, too long a path; the text names address, cause and the flag of
  // what is wrong.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options,
      const std::vector<grpc::Service*>& services);
  // The same errors, for before long work; the address is left free.
  static absl::Status CheckAddress(const ListenAddress& listen);
  ~GrpcServer();

  // 0 for a Unix socket.
  int port() const { return port_; }
  // What a client dials: "127.0.0.1:9000" or "unix:/run/kvasir.sock".
  const std::string& target() const { return target_; }

  // grpc.health.v1: one service, or "" for the server as a whole. The server
  // starts as not serving; a service is unknown until it is set.
  void SetServing(const std::string& service, bool serving);

  // Accepts nothing new, waits for running calls, cancels what runs at the
  // deadline, returns when all have ended. Idempotent.
  void Shutdown(absl::Time deadline);

 private:
  GrpcServer(std::unique_ptr<grpc::Server> server, std::string target, int port)
      : server_(std::move(server)), target_(std::move(target)), port_(port) {}

  const std::unique_ptr<grpc::Server> server_;
  const std::string target_;
  const int port_;
};

}  // namespace kvasir::base
