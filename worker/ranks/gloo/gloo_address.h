// The address of a rank of a Gloo group, as text that ranks exchange before
// they are connected.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// An IPv4 or IPv6 address with a port.
struct SocketAddress {
  sockaddr_storage bytes = {};
  socklen_t size = 0;

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&bytes);
  }
};

// Returns an address of this machine, with port 0. `interface` is one of the
// machine's addresses or the name of a network interface ("eth0"). For a name,
// returns the interface's IPv4 address or, if it has none, an IPv6 address that
// is not link-local. NOT_FOUND lists the interfaces that exist.
absl::StatusOr<SocketAddress> FindInterface(const std::string& interface);

struct GlooAddress {
  plan::TpShard shard;
  // The largest payload of a message. It must be the same on all ranks: larger
  // messages would overflow a receiver's memory.
  int64_t chunk_bytes = 0;
  // A secret that this rank has chosen: 32 random hex digits.
  std::string secret;
  // ports[r] is the address at which this rank listens for rank r. The element
  // for this rank itself is empty.
  std::vector<SocketAddress> ports;
};

inline constexpr int64_t kMaxGlooRanks = 256;

// Returns the address as one line of printable ASCII that begins with a format
// version.
std::string FormatGlooAddress(const GlooAddress& address);
// INVALID_ARGUMENT if the text is not a valid address. No error text contains
// the secret.
absl::StatusOr<GlooAddress> ParseGlooAddress(std::string_view text);

}  // namespace kvasir::worker
