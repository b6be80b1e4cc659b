// A follower's call to its leader: kvasir.v1.Rank over gRPC's callback API.
//
//   KVASIR_ASSIGN_OR_RETURN(auto client, RankClient::Dial(options));
//   RankFollower follower(...);
//   client->Join(&follower);
//   ...
//   client.reset();  // before the follower
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
  // Null: plain text. Whether that may be is the caller's to ask. The leader is
  // who has that address, or with TLS its certificate.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string secret;  // empty: none is shown
  // A leader that has not started yet is waited for.
  absl::Duration connect_timeout = absl::Minutes(5);
};

// Owns: the connection and the call.
// Threads: one; what the follower hears comes on gRPC's.
class RankClient {
 public:
  // Blocks until the leader is reached. UNAVAILABLE with address, time and the
  // last cause where it is not.
  static absl::StatusOr<std::unique_ptr<RankClient>> Dial(
      const RankClientOptions& options);
  // Ends the call; what the follower sent last has a moment to get out.
  ~RankClient();

  // Once. The follower hears of the call until this is destroyed.
  void Join(RankFollower* follower);

 private:
  class Call;
  RankClient(std::shared_ptr<grpc::Channel> channel, std::string secret);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string secret_;
  std::shared_ptr<Call> call_;
};

}  // namespace kvasir::worker
