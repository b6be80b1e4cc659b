// The flags of a tensor-parallel group: the number of ranks, where they join,
// and how they exchange activations.
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

// The TLS files for joining the group, used by the leader's listener and by the
// ranks that connect to it. Both sides must show a certificate that `ca` has
// signed.
struct RankTlsFlags {
  std::string certificate;
  std::string key;
  std::string ca;
  std::vector<std::string> names;
};

struct RankFlags {
  int tp = 1;  // number of ranks in the group
  // The number of ranks that one command starts on its host; 0: all.
  int local_ranks = 0;
  std::string collective = "auto";
  std::string nccl_library;
  // The network interface over which ranks exchange activations; empty:
  // loopback if all ranks are on this host.
  std::string interface;
  // The address at which ranks of other hosts join; empty if there are none.
  std::string listen;
  std::string secret_file;
  RankTlsFlags tls;
  // The i-th local rank after this process serves its metrics on port
  // metrics_port + i; 0: on free ports.
  int metrics_port = 8010;
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  // The following fields are only for `kvasir rank`.
  std::string leader;
  int rank = 0;
  // The pipe from the command that started this rank; -1: a user started the
  // rank.
  int join_fd = -1;

  int num_local() const { return local_ranks > 0 ? local_ranks : tp; }
};

// Adds the flags of the commands `serve` and `worker`, whose process is rank 0.
void AddLeaderFlags(CLI::App* app, RankFlags* flags);
// Adds the flags of the command `rank`.
void AddFollowerFlags(CLI::App* app, RankFlags* flags);

// INVALID_ARGUMENT for flags that contradict each other, or that have no effect
// because the group has one rank.
absl::Status CheckLeaderFlags(const RankFlags& flags);
absl::Status CheckFollowerFlags(const RankFlags& flags);

// The name of the collective, "gloo" or "nccl": the flag's value, or else the
// device's default.
std::string CollectiveOf(const RankFlags& flags, const DeviceFlags& device);
// INVALID_ARGUMENT if the device is unknown or does not support the collective.
absl::Status CheckCollective(const RankFlags& flags, const DeviceFlags& device);

// Reads the secret that ranks of other hosts must show. If `path` is empty, the
// result is empty, and these ranks show only a certificate. INVALID_ARGUMENT
// for a file without a secret.
absl::StatusOr<std::string> ReadSecret(const std::string& path);
// Makes a random secret.
std::string NewSecret();

// The credentials of the port on which ranks join; null means plain text.
// FAILED_PRECONDITION if plain text would go to another machine.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> RankListenCredentials(
    const RankFlags& flags, const base::ListenAddress& listen, bool insecure,
    base::TlsWatch* watch);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> RankDialCredentials(
    const RankFlags& flags, const std::string& leader, bool insecure,
    base::TlsWatch* watch);

}  // namespace kvasir::cli
