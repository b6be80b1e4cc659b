// Sends messages between the ranks of a group over Gloo's TCP transport. Each
// rank is connected to every other rank. Gloo's exceptions are converted to
// error statuses.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "plan/tp_shard.h"
#include "worker/ranks/gloo/gloo_address.h"

namespace gloo::transport {
class Context;
class Device;
class UnboundBuffer;
}  // namespace gloo::transport

namespace kvasir::worker {

struct GlooOptions {
  plan::TpShard shard;  // this rank, in a group of at least 2 ranks
  // A network interface of this machine, or one of its addresses, for all
  // traffic of the group. Use a network that only the ranks can reach: traffic
  // is not encrypted, and until Connect has ended, the ports accept
  // connections from any process. If such a process sends garbage, this process
  // ends, because Gloo throws an exception in its own thread.
  std::string interface;
  // How long Connect waits until all ranks are connected. An attempt to connect
  // that begins just before the end of this time may take as long again.
  absl::Duration connect_timeout = absl::Seconds(60);
  // How long a call waits for a message from another rank. Must be longer than
  // the longest time by which a rank may come late to a call.
  absl::Duration call_timeout = absl::Seconds(30);
  // The largest payload of a message in bytes, a multiple of 4. More data is
  // sent as several messages. A rank has memory for two outgoing messages, and
  // for two incoming messages from each other rank.
  int64_t chunk_bytes = 128 << 10;
};

// Identifies the collective call that a message belongs to. Sender and receiver
// must agree in all fields.
struct GlooCall {
  uint64_t number = 0;
  uint32_t kind = 0;
  int64_t bytes = 0;
};

// One rank's connections to all other ranks. Each message is sent to all of
// them. A receiver has memory for two messages from each sender, so a sender
// waits for receivers only if two of its messages are already in flight.
//
// Owns: its connections, its memory, Gloo's thread, and a thread that waits for
//   a message that ends the group or for a lost connection.
// Threads: one thread at a time, except that any thread may call Abort,
//   sent_bytes and waited_seconds at any time.
// Errors: those of Collective.
class GlooMesh {
 public:
  // Starts to listen for the other ranks. INVALID_ARGUMENT or NOT_FOUND if the
  // options are wrong. FAILED_PRECONDITION if SIGPIPE has its default action:
  // Gloo writes to sockets that other ranks may have closed, and the signal
  // would then end the process. `describe` returns the name of a call for error
  // texts.
  static absl::StatusOr<std::unique_ptr<GlooMesh>> Begin(
      const GlooOptions& options,
      std::function<std::string(const GlooCall&)> describe);
  ~GlooMesh();

  // One line of printable ASCII. It is a secret of the group: a process that
  // knows the addresses of all ranks can pose as a rank.
  const std::string& address() const { return address_; }
  // Call it once. addresses[r] is rank r's address(). INVALID_ARGUMENT if they
  // do not belong to one group; otherwise the same errors as Receive.
  absl::Status Connect(absl::Span<const std::string> addresses);

  plan::TpShard shard() const { return options_.shard; }
  int64_t chunk_bytes() const { return options_.chunk_bytes; }

  // Returns memory for the next message's payload: chunk_bytes() bytes, 8-byte
  // aligned, valid until Send.
  absl::StatusOr<char*> BeginSend();
  absl::Status Send(const GlooCall& call, int64_t payload_bytes);

  // Waits for the next message from rank `from` and returns its payload, which
  // is valid until Release(from).
  absl::StatusOr<const char*> Receive(const GlooCall& call, int64_t from,
                                      int64_t payload_bytes);
  absl::Status Release(int64_t from);

  void Abort(const absl::Status& reason);

  // Bytes written to sockets since Begin, including the overhead of Gloo but
  // not that of TCP.
  int64_t sent_bytes() const {
    return sent_bytes_.load(std::memory_order_relaxed);
  }
  // Time spent waiting for messages and for free send buffers, since Connect.
  double waited_seconds() const {
    return std::chrono::duration<double>(
               Clock::duration(waited_.load(std::memory_order_relaxed)))
        .count();
  }

 private:
  using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
  using Clock = std::chrono::steady_clock;
  // Memory for one message, and the Gloo buffer that refers to it.
  struct Place {
    char* memory = nullptr;
    Buffer buffer;
  };
  struct Peer {
    uint64_t token = 0;
    std::array<Place, 2> inbox;
    uint64_t received = 0;
  };

  GlooMesh(const GlooOptions& options,
           std::function<std::string(const GlooCall&)> describe);

  absl::Status Listen(const SocketAddress& at);
  absl::Status ReadAddresses(absl::Span<const std::string> addresses);
  absl::Status ConnectPairs(Clock::time_point deadline);
  // Closes all connections, including those that are still being established,
  // so that threads that wait for them wake up.
  void ClosePairs();
  void MakePlaces();
  absl::Status Greet();

  void Post(const Place& place, int64_t from);
  void SendTo(const Place& place, int64_t to, uint64_t slot, size_t bytes);
  // Calls `body`, which calls Gloo, and converts its exceptions to errors.
  template <typename Body>
  absl::Status Try(int64_t peer, const Body& body);
  // Calls wait(timeout in milliseconds), which calls one of Gloo's wait
  // functions. `peer` is the rank for which it waits; negative: any rank.
  template <typename Wait>
  absl::Status WaitFor(int64_t peer, const Wait& wait);
  absl::Status CheckHeader(const Place& place, const GlooCall& call,
                           int64_t from, int64_t payload_bytes);

  // The function that thread `watcher_` runs.
  void Watch();
  std::optional<int64_t> FindLost();
  // Returns the error for a failed connection. This is the error that the
  // watcher finds within kVerdictTimeout or, if it finds none, an error with
  // `text`.
  absl::Status Verdict(int64_t peer, const std::string& text);
  // Fail and failure() return the error that ended the group. If the group has
  // not ended, Fail first ends it with `failure`.
  absl::Status Fail(const absl::Status& failure);
  absl::Status failure();
  void WakeAll();

  // Constant after Connect, except for the bytes in memory_, which has the
  // buffers of all messages.
  const GlooOptions options_;
  const std::function<std::string(const GlooCall&)> describe_;
  std::string address_;
  // ports_[r] is where rank r listens for this rank.
  std::vector<SocketAddress> ports_;
  uint64_t token_ = 0;
  std::vector<char> memory_;

  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<Peer> peers_;
  std::array<Place, 2> outbox_;
  Place control_in_;  // receives one control message from each rank
  Place control_out_;
  std::thread watcher_;

  // Used only by the thread that makes the calls.
  Clock::duration timeout_;
  uint64_t sent_ = 0;
  // For each of the two outgoing messages: the number of ranks to which it has
  // not been sent yet.
  std::array<int64_t, 2> sending_ = {0, 0};

  std::atomic<int64_t> sent_bytes_{0};
  std::atomic<Clock::rep> waited_{0};

  base::Mutex mutex_;
  base::CondVar verdict_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool abort_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool watcher_left_ ABSL_GUARDED_BY(mutex_) = false;
  // Whether the Gloo buffers exist. If so, WakeAll must wake the threads that
  // wait on them.
  bool places_made_ ABSL_GUARDED_BY(mutex_) = false;
  // The deadline of the WaitFor in progress. Empty if no call waits.
  std::optional<Clock::time_point> deadline_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
