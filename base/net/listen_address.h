// The address where a server listens, and checks that say why it cannot
// listen there.
#pragma once

#include <string>

struct addrinfo;

namespace kvasir::base {

struct ListenAddress {
  // If not empty, the server listens on a Unix socket at this path, and host
  // and port are ignored.
  std::string unix_path;
  // The permissions of the socket file. 0 means those that the process's
  // umask gives.
  unsigned unix_mode = 0;
  // An IPv4 or IPv6 address, or a name.
  std::string host = "127.0.0.1";
  // 0 means any free port; the server reports which one it uses.
  int port = 0;
  // The flags that errors name: "choose another address with --port".
  std::string flag = "--port";
  std::string host_flag = "--host";
};

// Returns "127.0.0.1:80", or "[::1]:80": IPv6 addresses get brackets.
std::string JoinHostPort(const std::string& host, int port);

// The part of an address that makes listening fail, and the cause.
struct ListenTrouble {
  enum class With {
    kNothing,  // listening works
    kHost,  // the name does not resolve, or its address is not of this machine
    kPort,  // the port is taken, or needs more privileges
  };
  With with = With::kNothing;
  std::string cause;  // the system's text: "Address already in use"
};

// Tests whether a server could listen on one of `host`'s addresses. Its test
// sockets are closed again. If no address works, returns the trouble of the
// first one.
ListenTrouble ProbeListen(const std::string& host, int port);

// Counts the addresses of `host` in each family (IPv4, IPv6) and returns the
// larger count; 0 if the name does not resolve. Blocks as long as the system's
// resolver does.
int CountAddresses(const std::string& host);
// Does the same for a list of addresses from getaddrinfo, which may be null.
int CountAddresses(const addrinfo* found);

}  // namespace kvasir::base
