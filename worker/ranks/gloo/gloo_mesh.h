// Messages between the ranks of a group over Gloo's TCP. Each rank is connected
// to each other rank. Gloo throws exceptions; this class returns errors.
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
  plan::TpShard shard;  // at least 2 ranks
  // A network interface of this machine, or one of its addresses, for all
  // traffic of the group. Traffic is not encrypted. From Begin to Connect the
  // ports accept anybody, and garbage from them ends the process, because Gloo
  // throws in its own thread. So use a network that only the ranks can reach.
  std::string interface;
  // The longest time until all ranks are connected. In the worst case twice
  // this time passes.
  absl::Duration connect_timeout = absl::Seconds(60);
  // How long a call waits for a message from another rank. Ranks are apart by
  // as much as one of them is held up.
  absl::Duration call_timeout = absl::Seconds(30);
  // The largest payload of a message, a multiple of 4. A rank needs four times
  // this memory for each rank of the group, whatever the size of calls.
  int64_t chunk_bytes = 128 << 10;
};

// The call that a message belongs to. Sender and receiver must agree in all
// fields.
struct GlooCall {
  uint64_t number = 0;
  uint32_t kind = 0;
  int64_t bytes = 0;
};

// Each message goes to all other ranks. Every rank may have two messages on
// their way: receivers have memory for two, so a sender copies its payload and
// continues.
//
// Owns: its connections, its memory, Gloo's thread, and a thread that waits for
//   what ends the group: a rank that gives up or is gone.
// Threads: one at a time; Abort, sent_bytes and waited_seconds from any.
// Errors: those of Collective.
class GlooMesh {
 public:
  // Starts to listen. INVALID_ARGUMENT or NOT_FOUND for options.
  // FAILED_PRECONDITION if SIGPIPE has its default action, because Gloo writes
  // to sockets that other ranks may have closed. `describe` words calls in
  // errors.
  static absl::StatusOr<std::unique_ptr<GlooMesh>> Begin(
      const GlooOptions& options,
      std::function<std::string(const GlooCall&)> describe);
  ~GlooMesh();

  // One line of printable ASCII. Only ranks of the group may know it.
  const std::string& address() const { return address_; }
  // Call it once. addresses[r] is rank r's address(). INVALID_ARGUMENT if they
  // do not belong to one group; else the errors of calls, within
  // connect_timeout.
  absl::Status Connect(absl::Span<const std::string> addresses);

  plan::TpShard shard() const { return options_.shard; }
  int64_t chunk_bytes() const { return options_.chunk_bytes; }

  // Returns memory for a payload of chunk_bytes(), 8-byte aligned, valid until
  // Send.
  absl::StatusOr<char*> BeginSend();
  absl::Status Send(const GlooCall& call, int64_t payload_bytes);

  // Waits for the next payload from that rank. It is valid until Release.
  absl::StatusOr<const char*> Receive(const GlooCall& call, int64_t from,
                                      int64_t payload_bytes);
  absl::Status Release(int64_t from);

  void Abort(const absl::Status& reason);

  // Bytes written to sockets since Begin. Includes Gloo's overhead, but not
  // TCP's.
  int64_t sent_bytes() const {
    return sent_bytes_.load(std::memory_order_relaxed);
  }
  // Time spent waiting for messages and for room to send, since Connect.
  double waited_seconds() const {
    return std::chrono::duration<double>(
               Clock::duration(waited_.load(std::memory_order_relaxed)))
        .count();
  }

 private:
  using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
  using Clock = std::chrono::steady_clock;
  // Memory for one message.
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
  // Closes connections, also those that are still being made, so that waiting
  // for them ends.
  void ClosePairs();
  void MakePlaces();
  absl::Status Greet();

  void Post(const Place& place, int64_t from);
  void SendTo(const Place& place, int64_t to, uint64_t slot, size_t bytes);
  // Calls Gloo and converts exceptions to errors.
  template <typename Body>
  absl::Status Try(int64_t peer, const Body& body);
  // `wait` calls a wait of Gloo with a timeout in ms. `peer` below 0: any rank.
  template <typename Wait>
  absl::Status WaitFor(int64_t peer, const Wait& wait);
  absl::Status CheckHeader(const Place& place, const GlooCall& call,
                           int64_t from, int64_t payload_bytes);

  // The body of `watcher_`.
  void Watch();
  std::optional<int64_t> FindLost();
  // The error for a connection that failed: the watcher's if it finds one soon,
  // otherwise one with `text`.
  absl::Status Verdict(int64_t peer, const std::string& text);
  // Fail and failure return the error that ended the group. Fail sets it unless
  // one is set already.
  absl::Status Fail(const absl::Status& failure);
  absl::Status failure();
  void WakeAll();

  // Constant after Connect.
  const GlooOptions options_;
  const std::function<std::string(const GlooCall&)> describe_;
  std::string address_;
  // by rank: where that rank listens for this one
  std::vector<SocketAddress> ports_;
  uint64_t token_ = 0;
  std::vector<char> memory_;

  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<Peer> peers_;
  std::array<Place, 2> outbox_;
  Place control_in_;  // room for one message of each rank
  Place control_out_;
  std::thread watcher_;

  // Used by the calling thread.
  Clock::duration timeout_;
  uint64_t sent_ = 0;
  // how many ranks each message has still to be sent to
  std::array<int64_t, 2> sending_ = {0, 0};

  std::atomic<int64_t> sent_bytes_{0};
  std::atomic<Clock::rep> waited_{0};

  base::Mutex mutex_;
  base::CondVar verdict_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool abort_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool watcher_left_ ABSL_GUARDED_BY(mutex_) = false;
  // Whether there are buffers that other threads may wake.
  bool places_made_ ABSL_GUARDED_BY(mutex_) = false;
  // The deadline of the wait that a call is in.
  std::optional<Clock::time_point> deadline_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
