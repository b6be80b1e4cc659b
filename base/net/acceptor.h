// A listener of our own for servers of gRPC, whose own (1.51) stops listening
// for good once a process has run out of descriptors, knows no limit of
// connections, and cannot close while the server still answers.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/net/listen_address.h"

namespace kvasir::base {

// Owns: its listening sockets and its thread. A connection belongs to who took
//   it; of it only the descriptor's number and the socket's inode are kept, to
//   see whether it is still open.
// Threads: any thread, StopListening from one at a time; `take` runs on the
//   acceptor's own.
// Errors: FAILED_PRECONDITION when the address cannot be bound; the text names
//   address, cause and the flag of what is wrong. Later troubles are logged,
//   and tried again for ever.
class Acceptor {
 public:
  // Binds and listens; nothing is accepted before Run.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(
      const ListenAddress& listen);
  // The same errors, for before long work; the address is left free.
  static absl::Status Check(const ListenAddress& listen);
  // StopListening.
  ~Acceptor();

  struct Options {
    // Who comes while so many are open is hung up on.
    size_t max_connections = 1024;
    // When nobody came for so long, the acceptor calls itself, and listens anew
    // where it does not hear that: a socket's file may have been removed.
    absl::Duration probe_interval = absl::Seconds(10);
    // Gets a connection's descriptor, non-blocking, to keep and to close.
    std::function<void(int connection)> take;
  };
  // Once.
  void Run(Options options);

  // 0 for a Unix socket.
  int port() const { return port_; }
  // What a client dials: "127.0.0.1:9000" or "unix:/run/kvasir.sock".
  const std::string& target() const { return target_; }

  // Takes those that the system has let in already, then closes: whoever comes
  // now is refused by the system. Idempotent.
  void StopListening();
  // Connections that were taken and are still open.
  size_t connections() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends them: to both sides it looks as if the other had gone, after what was
  // already written.
  void HangUp() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Address {
    sockaddr_storage bytes = {};
    socklen_t size = 0;
    const sockaddr* get() const {
      return reinterpret_cast<const sockaddr*>(&bytes);
    }
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
    bool operator==(const Address& other) const;
  };
  struct Socket {
    int listening = -1;
    Address address;
    // A call to ourselves that has not been heard yet; -1: none.
    int probe = -1;
    Address probe_address;
    absl::Time opened_at = absl::InfinitePast();
  };

  explicit Acceptor(const ListenAddress& listen);
  absl::Status ListenTcp();
  absl::Status ListenUnix(Socket* socket);
  // A bound socket, or -1 and errno.
  static int Bind(const Address& address);
  void Loop();
  // True when somebody waits to be let in.
  bool Wait(absl::Duration timeout, bool also_listen);
  // False when there are no descriptors for it.
  bool AcceptAll(Socket* socket);
  void Take(int connection);
  void Probe(Socket* socket);
  void EndProbe(Socket* socket);
  void Reopen(Socket* socket, const std::string& why);
  absl::Status OpenAgain(Socket* socket);
  void CloseAll();
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ListenAddress listen_;
  const int wake_;
  std::string target_;
  int port_ = 0;
  Options options_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};

  // Of Listen, then of the thread, then of who has joined it.
  std::vector<Socket> sockets_;
  std::pair<dev_t, ino_t> unix_file_ = {};
  size_t turned_away_ = 0;
  absl::Time complained_at_ = absl::InfinitePast();

  Mutex mutex_;
  std::unordered_map<int, ino_t> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::base
