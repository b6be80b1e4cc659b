// A gRPC listener with every limit set, used for worker, router and
// admin ports.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/acceptor.h"
#include "base/net/listen_address.h"

namespace kvasir::base {

struct GrpcServerOptions {
  ListenAddress listen;
  // If null, the server uses plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  int64_t max_receive_message_bytes = 4 << 20;
  // The most concurrent calls per connection. It is high because a frontend
  // sends all its requests over a few connections.
  int max_concurrent_streams = 4096;
  // A call with more metadata is ended, and its connection is closed.
  int max_metadata_bytes = 16 << 10;
  absl::Duration handshake_timeout = absl::Seconds(10);
  // While the server sends a peer nothing, a ping less than this time after the
  // previous one is a strike. A peer with more than `max_ping_strikes` strikes
  // is disconnected; 0 means never, so use 0 only for trusted peers. Clients
  // may ping once a second; the default is lower, as pings may arrive early.
  absl::Duration min_ping_interval = absl::Milliseconds(500);
  int max_ping_strikes = 2;
  // The server sends GOAWAY on a connection older than this, so that clients
  // spread over replaced and added servers. Calls that run on it may finish. If
  // infinite, the server never closes a connection because of its age.
  absl::Duration max_connection_age = absl::Hours(1);
  // The server sends GOAWAY on a connection without calls after this time.
  absl::Duration max_connection_idle = absl::Minutes(5);
  // If this many connections are open, new ones are closed. 0 means half of the
  // process's limit of open descriptors.
  size_t max_connections = 0;
  // See Acceptor::Options::replace_oldest.
  bool replace_oldest_connection = false;
  // See Acceptor::Options::probe_interval.
  absl::Duration probe_interval = absl::Seconds(10);
  // Bytes that the transport may buffer for all connections together.
  int64_t transport_quota_bytes = 256 << 20;
  bool health_service = true;
  // Answer a request that cannot be parsed as the call's message type with
  // INVALID_ARGUMENT and a text; gRPC itself answers with UNIMPLEMENTED and no
  // text. This costs some time per message, so set it only for ports that
  // foreign clients use.
  bool explain_garbage = false;
  // If explain_garbage is set, this function is called on gRPC's threads for
  // each request that cannot be parsed. `method` is "/package.Service/Method".
  // The call ends with the returned status, or with INVALID_ARGUMENT if that is
  // OK. May be empty; must remain callable as long as the server exists.
  std::function<absl::Status(const std::string& method,
                             const grpc::ServerContextBase& context)>
      on_garbage;
  // Serves grpc.reflection.v1alpha, which describes all services and messages
  // to any client.
  bool reflection = false;
};

// Returns the size limit of messages for a model: 8 bytes for each of
// max_model_len tokens (text protocols send token ids as text) and 1 MiB for
// everything else.
int64_t MaxMessageBytesFor(int64_t max_model_len_tokens);

// Owns the running server. Registered services must outlive it; without
// services, the server has only its health service.
// Threads: its methods may be called from any thread.
class GrpcServer {
 public:
  // Returns FAILED_PRECONDITION if the address cannot be bound, for example
  // because it is in use, belongs to another machine or does not resolve. The
  // text names the address, the cause and the flag to change.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const GrpcServerOptions& options,
      const std::vector<grpc::Service*>& services);
  // Returns the error that Start would return, and leaves the address free.
  // Lets a program fail early, before long work.
  static absl::Status CheckAddress(const ListenAddress& listen);
  ~GrpcServer();

  // The port that is listened on; 0 for a Unix socket.
  int port() const { return acceptor_->port(); }
  // The address that a client dials: "127.0.0.1:9000" or
  // "unix:/run/kvasir.sock".
  const std::string& target() const { return acceptor_->target(); }

  // Sets the state that grpc.health.v1 reports for a service, or for the whole
  // server (""). The server starts as not serving; a service is unknown until
  // it is set.
  void SetServing(const std::string& service, bool serving);

  // The first step of a drain: new connections are refused, open ones are still
  // served. Idempotent.
  void StopListening() { acceptor_->StopListening(); }
  size_t connections() { return acceptor_->connections(); }

  // Refuses new connections, waits for running calls, cancels them at the
  // deadline, and returns when all have ended. Idempotent. gRPC 1.51 ends a
  // call that arrives during the shutdown with CANCELLED. If `hang_up` is set,
  // connections are closed first, so that the client sees a lost connection
  // instead. Set it only if no call should be running any more.
  void Shutdown(absl::Time deadline, bool hang_up = false);

 private:
  GrpcServer(std::unique_ptr<Acceptor> acceptor,
             std::unique_ptr<grpc::CallbackGenericService> nothing,
             std::unique_ptr<grpc::Server> server)
      : acceptor_(std::move(acceptor)),
        nothing_(std::move(nothing)),
        server_(std::move(server)) {}

  const std::unique_ptr<Acceptor> acceptor_;
  // Answers every call with UNIMPLEMENTED if no services are registered.
  const std::unique_ptr<grpc::CallbackGenericService> nothing_;
  const std::unique_ptr<grpc::Server> server_;
};

// Raises the process's limit of open descriptors to its hard limit, because
// each connection needs one. Returns the limit.
size_t RaiseDescriptorLimit();

}  // namespace kvasir::base
