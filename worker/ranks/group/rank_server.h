// The leader's gRPC server, which followers join: it serves kvasir.v1.Rank over
// gRPC's callback API.
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
  // Null: plain text. The caller must check whether that is allowed
  // (base::CheckPlaintext): anybody on the network path can then read the
  // secret and the step plans, which contain prompts.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // The secret that every follower must send. Empty: a follower must present a
  // certificate that the credentials trust (mutual TLS), or it is refused.
  std::string secret;
};

// Owns: the gRPC server.
// Threads: any thread may call any method.
// Errors: those of base::GrpcServer::Start.
class RankServer {
 public:
  // `leader` must outlive the server.
  static absl::StatusOr<std::unique_ptr<RankServer>> Start(
      const RankServerOptions& options, RankLeader* leader);
  // Ends all calls. Waits up to kRankLastWords for the leader's last messages
  // to be sent.
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
