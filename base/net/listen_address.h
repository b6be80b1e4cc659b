// Where a server listens, why it could not (servers of other libraries only say
// that it failed), and how its threads are woken.
#pragma once

#include <string>

namespace kvasir::base {

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

// Connects to whoever listens there and hangs up, without waiting.
void Knock(const std::string& host, int port);

}  // namespace kvasir::base
