#include "base/net/listen_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"

namespace kvasir::base {
namespace {

ListenTrouble TroubleOf(int error) {
  const bool port = error == EADDRINUSE || error == EACCES || error == EPERM;
  return {port ? ListenTrouble::With::kPort : ListenTrouble::With::kHost,
          std::strerror(error)};
}

ListenTrouble TryToListen(const addrinfo& address) {
  const int probe =
      ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, /*protocol=*/0);
  if (probe < 0) return TroubleOf(errno);
  const int on = 1;
  ::setsockopt(probe, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  ListenTrouble trouble;
  if (::bind(probe, address.ai_addr, address.ai_addrlen) != 0 ||
      ::listen(probe, 1) != 0) {
    trouble = TroubleOf(errno);
  }
  ::close(probe);
  return trouble;
}

// Resolves a host. Returns 0, or getaddrinfo's error. The caller frees `found`.
int Resolve(const std::string& host, int port, addrinfo** found) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  return ::getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, found);
}

}  // namespace

std::string JoinHostPort(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos && host[0] != '[';
  return v6 ? absl::StrCat("[", host, "]:", port)
            : absl::StrCat(host, ":", port);
}

ListenTrouble ProbeListen(const std::string& host, int port) {
  addrinfo* found = nullptr;
  const int error = Resolve(host, port, &found);
  if (error != 0) {
    return {ListenTrouble::With::kHost, ::gai_strerror(error)};
  }
  // Try all addresses, because this machine may lack the family (IPv6) of some
  // of them.
  ListenTrouble trouble = TryToListen(*found);
  for (const addrinfo* next = found->ai_next;
       next != nullptr && trouble.with != ListenTrouble::With::kNothing;
       next = next->ai_next) {
    if (TryToListen(*next).with == ListenTrouble::With::kNothing) trouble = {};
  }
  ::freeaddrinfo(found);
  return trouble;
}

int CountAddresses(const addrinfo* found) {
  std::map<int, int> of_family;
  int largest = 0;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    largest = std::max(largest, ++of_family[at->ai_family]);
  }
  return largest;
}

int CountAddresses(const std::string& host) {
  addrinfo* found = nullptr;
  if (Resolve(host, 0, &found) != 0) return 0;
  const int largest = CountAddresses(found);
  ::freeaddrinfo(found);
  return largest;
}

}  // namespace kvasir::base
