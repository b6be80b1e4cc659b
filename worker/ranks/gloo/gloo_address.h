// Where a rank of a Gloo group is reached, as text that travels between ranks
// before they are connected.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// An IPv4 or IPv6 address, and a port.
struct SocketAddress {
  sockaddr_storage bytes = {};
  socklen_t size = 0;

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&bytes);
  }
};

// `interface` names a network interface of this machine ("eth0": its IPv4
// address, else an IPv6 address that is valid beyond the link) or is one of the
// machine's addresses. Port 0. NOT_FOUND with the interfaces that there are.
absl::StatusOr<SocketAddress> FindInterface(const std::string& interface);

struct GlooAddress {
  plan::TpShard shard;
  // Largest payload of a message: the same on all ranks, or receivers of the
  // larger ones overflow.
  int64_t chunk_bytes = 0;
  // 32 hex digits that others cannot guess.
  std::string secret;
  // Of each rank, where it is to connect; nothing at this rank's own place.
  std::vector<SocketAddress> ports;
};

inline constexpr int64_t kMaxGlooRanks = 256;

// One line of printable ASCII, beginning with a version.
std::string FormatGlooAddress(const GlooAddress& address);
// INVALID_ARGUMENT with what is wrong; the secret is in no text.
absl::StatusOr<GlooAddress> ParseGlooAddress(std::string_view text);

}  // namespace kvasir::worker
