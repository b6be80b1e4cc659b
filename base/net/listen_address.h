// Where a server listens, and why it cannot.
#pragma once

#include <string>

struct addrinfo;

namespace kvasir::base {

struct ListenAddress {
  // Not empty: a Unix socket at this path; host and port are ignored.
  std::string unix_path;
  // Who may connect there; 0: as the process's umask has it.
  unsigned unix_mode = 0;
  // An IPv4 or IPv6 address, or a name.
  std::string host = "127.0.0.1";
  // 0: any free port; the server says which.
  int port = 0;
  // Named in errors: "choose another with --port".
  std::string flag = "--port";
  std::string host_flag = "--host";
};

// "127.0.0.1:80", "[::1]:80": IPv6 addresses go into brackets.
std::string JoinHostPort(const std::string& host, int port);

// Which part of an address stands in the way.
struct ListenTrouble {
  enum class With {
    kNothing,  // it works from here, or does by now
    kHost,     // no such name, or no address of this machine
    kPort,     // taken, or not ours to take
  };
  With with = With::kNothing;
  std::string cause;  // of the system: "Address already in use"
};

// Tries to listen on `host`'s addresses until one works, and stops at once.
// Else the trouble is that of the first.
ListenTrouble ProbeListen(const std::string& host, int port);

// How many addresses `host` has, of the family of which it has the most; 0: it
// does not resolve. Takes as long as the system's resolver.
int CountAddresses(const std::string& host);
// The same of what a resolver has found; may be null.
int CountAddresses(const addrinfo* found);

}  // namespace kvasir::base
