// The flags of a tensor-parallel group: how many ranks, where they meet, what
// they exchange activations over.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/listen_address.h"
#include "base/net/tls.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {

// Of the listener on which ranks join, and of those that dial it: both show a
// certificate of `ca`.
struct RankTlsFlags {
  std::string certificate;
  std::string key;
  std::string ca;
  std::vector<std::string> names;
};

struct RankFlags {
  int tp = 1;  // ranks of the group
  // Of them, those that one command starts on its host; 0: all.
  int local_ranks = 0;
  std::string collective = "auto";
  std::string nccl_library;
  // Of the exchange of activations; empty: loopback where all ranks are here.
  std::string interface;
  // Where ranks of other hosts join; empty: there are none.
  std::string listen;
  std::string secret_file;
  RankTlsFlags tls;
  // Of local ranks behind the first: the i-th has port + i; 0: free ones.
  int metrics_port = 8010;
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  // Of `kvasir rank`.
  std::string leader;
  int rank = 0;
  // Of one that another command started: what it says comes here.
  int join_fd = -1;

  int num_local() const { return local_ranks > 0 ? local_ranks : tp; }
};

// Of serve and worker, whose process is rank 0.
void AddLeaderFlags(CLI::App* app, RankFlags* flags);
// Of rank.
void AddFollowerFlags(CLI::App* app, RankFlags* flags);

// INVALID_ARGUMENT for flags that contradict each other, or that nothing reads
// in a group of one.
absl::Status CheckLeaderFlags(const RankFlags& flags);
absl::Status CheckFollowerFlags(const RankFlags& flags);

// "gloo" or "nccl": what the flag says, or the device wants.
std::string CollectiveOf(const RankFlags& flags, const DeviceFlags& device);
// INVALID_ARGUMENT where a group's device does not have it, or is not known.
absl::Status CheckCollective(const RankFlags& flags, const DeviceFlags& device);

// What ranks of other hosts show. Empty: nothing but a certificate.
// INVALID_ARGUMENT for a file that holds no secret.
absl::StatusOr<std::string> ReadSecret(const std::string& path);
// One that nobody guesses.
std::string NewSecret();

// Null: plain text. FAILED_PRECONDITION where that would leave the machine.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> RankListenCredentials(
    const RankFlags& flags, const base::ListenAddress& listen, bool insecure,
    base::TlsWatch* watch);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> RankDialCredentials(
    const RankFlags& flags, const std::string& leader, bool insecure,
    base::TlsWatch* watch);

}  // namespace kvasir::cli
