#include "worker/ranks/gloo/gloo_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace kvasir::worker {
namespace {

constexpr std::string_view kVersion = "kvasir-gloo-1";
constexpr size_t kSecretDigits = 32;
// The longest text that is parsed, which is far longer than any valid address.
constexpr size_t kMaxTextBytes = 32 << 10;

const sockaddr_in& AsV4(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& AsV6(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

SocketAddress CopyOf(const sockaddr* address) {
  SocketAddress copy;
  copy.size = address->sa_family == AF_INET ? sizeof(sockaddr_in)
                                            : sizeof(sockaddr_in6);
  std::memcpy(&copy.bytes, address, copy.size);
  return copy;
}

// Parses an IP address without a port. `text` must have neither brackets nor an
// IPv6 zone ("%eth0").
absl::StatusOr<SocketAddress> ParseHost(const std::string& text) {
  SocketAddress address;
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&address.bytes);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    address.size = sizeof(sockaddr_in);
    return address;
  }
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address.bytes);
  if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    address.size = sizeof(sockaddr_in6);
    return address;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is neither an IPv4 nor an IPv6 address"));
}

bool SameHost(const sockaddr* a, const sockaddr* b) {
  if (a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return AsV4(a).sin_addr.s_addr == AsV4(b).sin_addr.s_addr;
  }
  return IN6_ARE_ADDR_EQUAL(&AsV6(a).sin6_addr, &AsV6(b).sin6_addr);
}

std::string FormatPort(const SocketAddress& address) {
  char host[INET6_ADDRSTRLEN] = "";
  if (address.bytes.ss_family == AF_INET) {
    const sockaddr_in& v4 = AsV4(address.get());
    inet_ntop(AF_INET, &v4.sin_addr, host, sizeof(host));
    return absl::StrCat(host, ":", ntohs(v4.sin_port));
  }
  const sockaddr_in6& v6 = AsV6(address.get());
  inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof(host));
  return absl::StrCat("[", host, "]:", ntohs(v6.sin6_port));
}

absl::StatusOr<SocketAddress> ParsePort(std::string_view text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == std::string_view::npos ||
      !absl::SimpleAtoi(base::AbslView(text.substr(colon + 1)), &port) ||
      port < 1 || port > 65535) {
    return absl::InvalidArgumentError(
        "a socket address does not end with a port from 1 to 65535");
  }
  std::string host(text.substr(0, colon));
  const bool brackets =
      host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (brackets) host = host.substr(1, host.size() - 2);
  KVASIR_ASSIGN_OR_RETURN(SocketAddress address, ParseHost(host));
  if (brackets != (address.bytes.ss_family == AF_INET6)) {
    return absl::InvalidArgumentError(
        "an IPv6 address must be in brackets, an IPv4 address must not");
  }
  const auto in_order = htons(static_cast<uint16_t>(port));
  if (brackets) {
    reinterpret_cast<sockaddr_in6*>(&address.bytes)->sin6_port = in_order;
  } else {
    reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_port = in_order;
  }
  return address;
}

}  // namespace

absl::StatusOr<SocketAddress> FindInterface(const std::string& interface) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot list the network interfaces: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(found, &freeifaddrs);
  const absl::StatusOr<SocketAddress> host = ParseHost(interface);
  const sockaddr* best = nullptr;
  std::vector<std::string> names;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (std::find(names.begin(), names.end(), each->ifa_name) == names.end()) {
      names.push_back(each->ifa_name);
    }
    const sockaddr* const address = each->ifa_addr;
    if (address == nullptr) continue;
    const bool v4 = address->sa_family == AF_INET;
    if (!v4 && address->sa_family != AF_INET6) continue;
    if (host.ok()) {
      if (SameHost(address, host->get())) return CopyOf(address);
      continue;
    }
    if (interface != each->ifa_name) continue;
    // Skip link-local addresses: they are valid only together with an interface
    // of this machine, so other hosts cannot use them.
    if (!v4 && IN6_IS_ADDR_LINKLOCAL(&AsV6(address).sin6_addr)) continue;
    if (best == nullptr || (v4 && best->sa_family != AF_INET)) best = address;
  }
  if (best != nullptr) return CopyOf(best);
  return absl::NotFoundError(absl::StrCat(
      "'", interface,
      "' is neither an address of this machine nor the name of a network "
      "interface with an IPv4 address, or an IPv6 address that is not "
      "link-local; this machine's interfaces: ",
      absl::StrJoin(names, ", ")));
}

std::string FormatGlooAddress(const GlooAddress& address) {
  std::string text = absl::StrCat(
      base::AbslView(kVersion), " ", address.shard.rank, " ",
      address.shard.size, " ", address.chunk_bytes, " ", address.secret);
  for (const SocketAddress& port : address.ports) {
    absl::StrAppend(&text, " ", port.size == 0 ? "-" : FormatPort(port));
  }
  return text;
}

absl::StatusOr<GlooAddress> ParseGlooAddress(std::string_view text) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "is ", text.size(), " bytes long, the limit is ", kMaxTextBytes));
  }
  const std::vector<std::string> fields =
      absl::StrSplit(base::AbslView(text), ' ');
  constexpr size_t kPorts = 5;
  if (fields[0] != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("does not begin with ", base::AbslView(kVersion)));
  }
  GlooAddress address;
  plan::TpShard& shard = address.shard;
  if (fields.size() < kPorts || !absl::SimpleAtoi(fields[1], &shard.rank) ||
      !absl::SimpleAtoi(fields[2], &shard.size) ||
      !absl::SimpleAtoi(fields[3], &address.chunk_bytes)) {
    return absl::InvalidArgumentError(
        "must have, after the version, four fields: a rank, the number of "
        "ranks and the size of a chunk in bytes as numbers below 2^63, and a "
        "secret");
  }
  if (shard.size < 2 || shard.size > kMaxGlooRanks || shard.rank < 0 ||
      shard.rank >= shard.size || address.chunk_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "says rank ", shard.rank, " of ", shard.size, " and chunks of ",
        address.chunk_bytes, " bytes; want 2 to ", kMaxGlooRanks,
        " ranks, a rank of at least 0 that is less than the number of ranks, "
        "and chunks of at least 1 byte"));
  }
  address.secret = fields[4];
  if (address.secret.size() != kSecretDigits ||
      address.secret.find_first_not_of("0123456789abcdef") !=
          std::string::npos) {
    return absl::InvalidArgumentError(
        "the secret is not 32 lowercase hex digits");
  }
  if (fields.size() != kPorts + static_cast<size_t>(shard.size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("must have ", shard.size,
                     " socket addresses, one for each rank, but has ",
                     fields.size() - kPorts));
  }
  for (int64_t rank = 0; rank < shard.size; ++rank) {
    const std::string& field = fields[kPorts + static_cast<size_t>(rank)];
    if ((field == "-") != (rank == shard.rank)) {
      return absl::InvalidArgumentError(
          "must have \"-\" for its own rank and a socket address for each "
          "other "
          "rank");
    }
    SocketAddress port;
    if (rank != shard.rank) {
      KVASIR_ASSIGN_OR_RETURN(port, ParsePort(field));
    }
    address.ports.push_back(port);
  }
  return address;
}

}  // namespace kvasir::worker
