// A follower's call to its leader: kvasir.v1.Rank over gRPC's callback API.
//
//   KVASIR_ASSIGN_OR_RETURN(auto client, RankClient::Dial(options));
//   RankFollower follower(...);
//   client->Join(&follower);
//   ...
//   client.reset();  // before the follower is destroyed
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/ranks/group/rank_follower.h"

namespace kvasir::worker {

struct RankClientOptions {
  // "host:port" or "unix:/path".
  std::string leader;
  // Null: plain text; the caller must check whether that is allowed. With TLS
  // the leader is identified by its certificate, otherwise only by its address.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string secret;  // the group's secret; empty: none is sent
  // How long to wait for a leader that has not started yet.
  absl::Duration connect_timeout = absl::Minutes(5);
};

// Owns: the connection and the call.
// Threads: one thread at a time. The follower is called from gRPC's threads.
class RankClient {
 public:
  // Blocks until the leader is connected. UNAVAILABLE with the address, the
  // time and the last cause if it cannot be reached within connect_timeout.
  static absl::StatusOr<std::unique_ptr<RankClient>> Dial(
      const RankClientOptions& options);
  // Ends the call. Waits up to kRankLastWords for the follower's last messages
  // to be sent.
  ~RankClient();

  // Starts the Join call. Call it once. The follower receives the call's events
  // until the client is destroyed.
  void Join(RankFollower* follower);

 private:
  class Call;
  RankClient(std::shared_ptr<grpc::Channel> channel, std::string secret);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string secret_;
  std::shared_ptr<Call> call_;
};

}  // namespace kvasir::worker
