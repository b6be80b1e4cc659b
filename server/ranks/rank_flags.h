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

// The TLS files for connections between the leader and ranks that join. Both
// sides must show a certificate that an authority in `ca` has signed.
struct RankTlsFlags {
  std::string certificate;
  std::string key;
  std::string ca;
  std::vector<std::string> names;
};

struct RankFlags {
  int tp = 1;  // number of ranks in the group
  // The number of ranks that one command starts on its host. 0 means all ranks.
  int local_ranks = 0;
  std::string collective = "auto";
  std::string nccl_library;
  // The network interface over which ranks exchange activations. May be empty
  // if all ranks are on this host.
  std::string interface;
  // The address at which ranks of other hosts join; empty if there are none.
  std::string listen;
  std::string secret_file;
  RankTlsFlags tls;
  // The metrics of the i-th rank that this process starts are on port
  // metrics_port + i. If metrics_port is 0, each rank uses a free port.
  int metrics_port = 8010;
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  // The following fields are only for `kvasir rank`.
  std::string leader;
  int rank = 0;
  // The descriptor of the pipe from the process that started this rank; -1 if a
  // user started it.
  int join_fd = -1;

  int num_local() const { return local_ranks > 0 ? local_ranks : tp; }
};

// Adds the flags of the commands `serve` and `worker`, whose process is rank 0.
void AddLeaderFlags(CLI::App* app, RankFlags* flags);
// Adds the flags of the command `rank`.
void AddFollowerFlags(CLI::App* app, RankFlags* flags);

// Return INVALID_ARGUMENT if flags are missing, contradict each other, or have
// no effect.
absl::Status CheckLeaderFlags(const RankFlags& flags);
absl::Status CheckFollowerFlags(const RankFlags& flags);

// Returns the name of the collective, "gloo" or "nccl": the flag's value, or
// the device's default if it is "auto".
std::string CollectiveOf(const RankFlags& flags, const DeviceFlags& device);
// Returns INVALID_ARGUMENT for --device auto with several ranks, and if the
// device does not support the collective.
absl::Status CheckCollective(const RankFlags& flags, const DeviceFlags& device);

// Reads the secret that ranks of other hosts must show. If `path` is empty,
// returns an empty secret; these ranks then show only a certificate.
// INVALID_ARGUMENT if the file is not one word.
absl::StatusOr<std::string> ReadSecret(const std::string& path);
// Returns a random secret.
std::string NewSecret();

// Returns the credentials of the port on which ranks join; null for plain text.
// FAILED_PRECONDITION if plain text would go to another machine.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> RankListenCredentials(
    const RankFlags& flags, const base::ListenAddress& listen, bool insecure,
    base::TlsWatch* watch);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> RankDialCredentials(
    const RankFlags& flags, const std::string& leader, bool insecure,
    base::TlsWatch* watch);

}  // namespace kvasir::cli
