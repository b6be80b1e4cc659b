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

// TLS of the listener on which ranks join, and of the ranks that call it. Both
// show a certificate of `ca`.
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
  // The network interface for activations; empty: loopback if all ranks are on
  // this host.
  std::string interface;
  // The address where ranks of other hosts join; empty if there are none.
  std::string listen;
  std::string secret_file;
  RankTlsFlags tls;
  // The i-th local rank after this process has port + i; 0: free ports.
  int metrics_port = 8010;
  absl::Duration join_timeout = absl::Minutes(5);
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  // Only for `kvasir rank`.
  std::string leader;
  int rank = 0;
  // The pipe from the command that started this rank; -1: a user started it.
  int join_fd = -1;

  int num_local() const { return local_ranks > 0 ? local_ranks : tp; }
};

// Adds the flags of serve and worker, whose process is rank 0.
void AddLeaderFlags(CLI::App* app, RankFlags* flags);
// Adds the flags of rank.
void AddFollowerFlags(CLI::App* app, RankFlags* flags);

// INVALID_ARGUMENT for flags that contradict each other, or that have no effect
// in a group of one.
absl::Status CheckLeaderFlags(const RankFlags& flags);
absl::Status CheckFollowerFlags(const RankFlags& flags);

// "gloo" or "nccl": by the flag, or by the device.
std::string CollectiveOf(const RankFlags& flags, const DeviceFlags& device);
// INVALID_ARGUMENT if the device of a group does not support the collective or
// is unknown.
absl::Status CheckCollective(const RankFlags& flags, const DeviceFlags& device);

// The secret that ranks of other hosts show; empty if they show only a
// certificate. INVALID_ARGUMENT for a file without a secret.
absl::StatusOr<std::string> ReadSecret(const std::string& path);
// Makes a random secret.
std::string NewSecret();

// Null means plain text. FAILED_PRECONDITION if plain text would leave the
// machine.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> RankListenCredentials(
    const RankFlags& flags, const base::ListenAddress& listen, bool insecure,
    base::TlsWatch* watch);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> RankDialCredentials(
    const RankFlags& flags, const std::string& leader, bool insecure,
    base::TlsWatch* watch);

}  // namespace kvasir::cli
