// The listener on which followers join their leader: kvasir.v1.Rank over gRPC's
// callback API.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/grpc_server.h"
#include "base/net/listen_address.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {

struct RankServerOptions {
  base::ListenAddress listen;
  // Null: plain text. Whether that may be is the caller's to ask
  // (base::CheckPlaintext): secret and step plans, which hold prompts, are then
  // for everybody on the way to read.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // That every follower shows. Empty: it shows a certificate that the
  // credentials believe (mutual TLS), or is refused.
  std::string secret;
};

// Owns: the listener.
// Threads: any.
// Errors: see base::GrpcServer::Start.
class RankServer {
 public:
  // `leader` outlives it.
  static absl::StatusOr<std::unique_ptr<RankServer>> Start(
      const RankServerOptions& options, RankLeader* leader);
  // Ends all calls. What the leader sent last has a moment to get out.
  ~RankServer();

  int port() const { return server_->port(); }
  const std::string& target() const { return server_->target(); }

 private:
  class Service;
  RankServer();

  std::unique_ptr<Service> service_;
  std::unique_ptr<base::GrpcServer> server_;
};

}  // namespace kvasir::worker
