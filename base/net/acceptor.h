// Accepts connections on behalf of a gRPC server. gRPC's own listener (1.51) is
// not used, because it stops for good once the process has run out of
// descriptors, cannot limit the number of connections, and cannot be closed
// while the server still answers.
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

// Owns: its listening sockets and its thread. Accepted connections belong to
//   the function Options::take. The acceptor keeps only their descriptor
//   numbers and inodes, to see which are still open.
// Threads: its methods may be called from any thread, but StopListening by only
//   one thread at a time. `take` runs on the acceptor's own thread.
// Errors: FAILED_PRECONDITION if the address cannot be bound; the text names
//   the address, the cause and the flag to change. After later errors, which
//   are logged, the acceptor tries again.
class Acceptor {
 public:
  // Binds the address and listens. No connection is accepted before Run.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(
      const ListenAddress& listen);
  // Returns the error that Listen would return, and leaves the address free.
  // Lets a program fail early, before long work.
  static absl::Status Check(const ListenAddress& listen);
  // Calls StopListening.
  ~Acceptor();

  struct Options {
    // If this many connections are open, new ones are closed immediately.
    size_t max_connections = 1024;
    // If true, a connection beyond max_connections shuts down the oldest
    // connection; only connections beyond twice max_connections are closed.
    // Meant for ports of health probes: clients that keep connections open
    // cannot lock the probes out.
    bool replace_oldest = false;
    // If no connection has arrived for this long, the acceptor connects to
    // itself (a probe). If the probe does not arrive, the acceptor opens a
    // new listening socket: a Unix socket's file may have been removed,
    // for example.
    absl::Duration probe_interval = absl::Seconds(10);
    // Receives the descriptor of a connection, which is non-blocking. The
    // receiver must close it.
    std::function<void(int connection)> take;
  };
  // Starts to accept connections. Call once.
  void Run(Options options);

  // The port that is listened on; 0 for a Unix socket.
  int port() const { return port_; }
  // The address that a client dials: "127.0.0.1:9000" or
  // "unix:/run/kvasir.sock".
  const std::string& target() const { return target_; }

  // Takes the connections that the system has already accepted, then
  // closes the listening sockets, so that the system refuses later
  // connections. Idempotent.
  void StopListening();
  // The number of accepted connections that are still open.
  size_t connections() ABSL_LOCKS_EXCLUDED(mutex_);
  // Shuts down all open connections, so that both client and server see that
  // the other side has closed. Data that was already written is still sent.
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
    // The descriptor of a probe that has not been accepted yet; -1 if there
    // is none.
    int probe = -1;
    Address probe_address;
    absl::Time opened_at = absl::InfinitePast();
  };

  explicit Acceptor(const ListenAddress& listen);
  absl::Status ListenTcp();
  absl::Status ListenUnix(Socket* socket);
  // Returns a bound socket; or -1, with the cause in errno.
  static int Bind(const Address& address);
  void Loop();
  // Waits until a connection can be accepted, but at most for `timeout`.
  // Returns whether one can.
  bool Wait(absl::Duration timeout, bool also_listen);
  // Returns false if there are no descriptors left.
  bool AcceptAll(Socket* socket);
  void Take(int connection);
  void Probe(Socket* socket);
  void EndProbe(Socket* socket);
  void Reopen(Socket* socket, const std::string& why);
  absl::Status OpenAgain(Socket* socket);
  void CloseAll();
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ShutDownOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ListenAddress listen_;
  const int wake_;
  std::string target_;
  int port_ = 0;
  Options options_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};

  // Used by one thread at a time: first by Listen's caller, then by the
  // acceptor's thread, and again by a caller after that thread has ended.
  std::vector<Socket> sockets_;
  std::pair<dev_t, ino_t> unix_file_ = {};
  size_t num_closed_ = 0;
  absl::Time logged_at_ = absl::InfinitePast();

  struct Open {
    ino_t inode = 0;
    uint64_t number = 0;  // later connections have larger numbers
    bool shut_down = false;
  };

  Mutex mutex_;
  uint64_t num_accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<int, Open> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::base
