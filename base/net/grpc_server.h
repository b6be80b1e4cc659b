// A gRPC listener with every limit set: one way to start a server for worker,
// router and admin ports alike.
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
  // Null: plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  int64_t max_receive_message_bytes = 4 << 20;
  // Per connection. A frontend multiplexes all its requests over a few.
  int max_concurrent_streams = 4096;
  int max_metadata_bytes = 16 << 10;  // more ends the connection, too
  absl::Duration handshake_timeout = absl::Seconds(10);
  // A peer that pings more often on an idle connection is sent away after
  // `max_ping_strikes` of them; 0 strikes: never (allow-listed peers only).
  absl::Duration min_ping_interval = absl::Seconds(10);
  int max_ping_strikes = 2;
  // A connection older than this is told to go, so that clients spread anew
  // over replaced and added servers; calls that run on it end in their own
  // time. Infinite: connections live as long as their clients like.
  absl::Duration max_connection_age = absl::Hours(1);
  // A connection without calls is told to go after this.
  absl::Duration max_connection_idle = absl::Minutes(5);
  // More are hung up on; 0: half of the descriptors that the process may have.
  size_t max_connections = 0;
  // Of the acceptor: see there.
  absl::Duration probe_interval = absl::Seconds(10);
  // Bytes that the transport may buffer for all connections together.
  int64_t transport_quota_bytes = 256 << 20;
  bool health_service = true;
  // Bytes that are no message are INVALID_ARGUMENT with a text, not
  // UNIMPLEMENTED without one. For clients that nobody here has written: gRPC
  // does more for every message then.
  bool explain_garbage = false;
  // Told of each, by the call's method ("/package.Service/Method"), on gRPC's
  // threads. What it returns ends the call; OK: the text above does. May be
  // empty; lives as long as the server.
  std::function<absl::Status(const std::string& method,
                             const grpc::ServerContextBase& context)>
      on_garbage;
  // Tells whoever asks which services there are and what their messages hold
  // (grpc.reflection.v1alpha).
  bool reflection = false;
};

// What prompts of max_model_len need: 8 bytes a token (ids as text-era clients
// send them) and 1 MiB for everything else.
int64_t MaxMessageBytesFor(int64_t max_model_len_tokens);

// Owns the running server. Registered services must outlive it; there may be
// none, for health alone.
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
  int port() const { return acceptor_->port(); }
  // What a client dials: "127.0.0.1:9000" or "unix:/run/kvasir.sock".
  const std::string& target() const { return acceptor_->target(); }

  // grpc.health.v1: one service, or "" for the server as a whole. The server
  // starts as not serving; a service is unknown until it is set.
  void SetServing(const std::string& service, bool serving);

  // The first part of an end: nobody else is let in, while those who are in go
  // on being served. Idempotent.
  void StopListening() { acceptor_->StopListening(); }
  // Connections that are open.
  size_t connections() { return acceptor_->connections(); }

  // Lets nobody in, waits for running calls, cancels what runs at the
  // deadline, returns when all have ended. Idempotent. gRPC (1.51) turns a call
  // that comes in at this moment into CANCELLED, which clients take for their
  // own doing: where `hang_up`, connections are ended first, so that they hear
  // of a lost connection, and no call should run any more.
  void Shutdown(absl::Time deadline, bool hang_up = false);

 private:
  GrpcServer(std::unique_ptr<Acceptor> acceptor,
             std::unique_ptr<grpc::CallbackGenericService> nothing,
             std::unique_ptr<grpc::Server> server)
      : acceptor_(std::move(acceptor)),
        nothing_(std::move(nothing)),
        server_(std::move(server)) {}

  const std::unique_ptr<Acceptor> acceptor_;
  // Answers UNIMPLEMENTED, where there is no other service.
  const std::unique_ptr<grpc::CallbackGenericService> nothing_;
  const std::unique_ptr<grpc::Server> server_;
};

// Raises what the process may open to what it may raise it to: connections are
// descriptors. Returns how many that is.
size_t RaiseDescriptorLimit();

}  // namespace kvasir::base
