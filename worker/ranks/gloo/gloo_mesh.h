// Messages between the ranks of a group, over Gloo's TCP: each rank connected
// to each other. Gloo throws; nothing here does.
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
  plan::TpShard shard;  // of 2 ranks at least
  // A network interface of this machine, or one of its addresses: all traffic
  // of the group goes over it. Not encrypted, and from Begin to Connect the
  // ports take whoever comes, whose nonsense ends the process, for Gloo throws
  // in its own thread: a network that only the ranks are in.
  std::string interface;
  // Until all ranks are connected; at worst twice as long passes.
  absl::Duration connect_timeout = absl::Seconds(60);
  // How long a call waits for a rank without hearing of it. Ranks are as far
  // apart as one of them is held up.
  absl::Duration call_timeout = absl::Seconds(30);
  // Largest payload of a message, a multiple of 4. A rank takes four times this
  // for each rank of the group, whatever the calls' sizes.
  int64_t chunk_bytes = 128 << 10;
};

// What a message belongs to; sender and receiver must agree in all of it.
struct GlooCall {
  uint64_t number = 0;
  uint32_t kind = 0;
  int64_t bytes = 0;
};

// Each message goes to all other ranks. Two of each rank may be on their way:
// receivers have memory for two, so a sender copies its payload and goes on.
//
// Owns: its connections, its memory, Gloo's thread and one that waits for what
//   ends the group: a rank that gives up or is gone.
// Threads: one at a time; Abort, sent_bytes and waited_seconds from any.
// Errors: as Collective's.
class GlooMesh {
 public:
  // Listens. INVALID_ARGUMENT or NOT_FOUND for options; FAILED_PRECONDITION
  // where SIGPIPE has its default action: Gloo writes to sockets that others
  // close. `describe` is for errors.
  static absl::StatusOr<std::unique_ptr<GlooMesh>> Begin(
      const GlooOptions& options,
      std::function<std::string(const GlooCall&)> describe);
  ~GlooMesh();

  // One line of printable ASCII that is known to ranks of the group alone.
  const std::string& address() const { return address_; }
  // Once. addresses[r] is what rank r calls its own. INVALID_ARGUMENT when they
  // are not of one group; else as calls, and within the timeout of connecting.
  absl::Status Connect(absl::Span<const std::string> addresses);

  plan::TpShard shard() const { return options_.shard; }
  int64_t chunk_bytes() const { return options_.chunk_bytes; }

  // Memory for a payload of chunk_bytes(), 8-byte aligned, until Send.
  absl::StatusOr<char*> BeginSend();
  absl::Status Send(const GlooCall& call, int64_t payload_bytes);

  // The next payload of that rank, until Release.
  absl::StatusOr<const char*> Receive(const GlooCall& call, int64_t from,
                                      int64_t payload_bytes);
  absl::Status Release(int64_t from);

  void Abort(const absl::Status& reason);

  // To sockets, from Begin on: what Gloo adds included, what TCP adds not.
  int64_t sent_bytes() const {
    return sent_bytes_.load(std::memory_order_relaxed);
  }
  // For other ranks' messages, and for room for this one's; since Connect.
  double waited_seconds() const {
    return std::chrono::duration<double>(
               Clock::duration(waited_.load(std::memory_order_relaxed)))
        .count();
  }

 private:
  using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
  using Clock = std::chrono::steady_clock;
  // A message of one slot of memory.
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
  // Connections and those that are to be: waiting for one ends.
  void ClosePairs();
  void MakePlaces();
  absl::Status Greet();

  void Post(const Place& place, int64_t from);
  void SendTo(const Place& place, int64_t to, uint64_t slot, size_t bytes);
  // Calls Gloo.
  template <typename Body>
  absl::Status Try(int64_t peer, const Body& body);
  // `wait` is Gloo's, of a timeout in ms. `peer` below 0: any.
  template <typename Wait>
  absl::Status WaitFor(int64_t peer, const Wait& wait);
  absl::Status CheckHeader(const Place& place, const GlooCall& call,
                           int64_t from, int64_t payload_bytes);

  // The body of `watcher_`.
  void Watch();
  std::optional<int64_t> FindLost();
  // What the watcher says of a connection that failed; else `text`.
  absl::Status Verdict(int64_t peer, const std::string& text);
  // Both return what the group died of: this, unless there was something.
  absl::Status Fail(const absl::Status& failure);
  absl::Status failure();
  void WakeAll();

  // Constant after Connect.
  const GlooOptions options_;
  const std::function<std::string(const GlooCall&)> describe_;
  std::string address_;
  std::vector<SocketAddress> ports_;  // of each rank, where it listens for this
  uint64_t token_ = 0;
  std::vector<char> memory_;

  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<Peer> peers_;
  std::array<Place, 2> outbox_;
  Place control_in_;  // a message of each rank
  Place control_out_;
  std::thread watcher_;

  // Of the thread that calls.
  Clock::duration timeout_;
  uint64_t sent_ = 0;
  std::array<int64_t, 2> sending_ = {0, 0};  // ranks that a message goes to yet

  std::atomic<int64_t> sent_bytes_{0};
  std::atomic<Clock::rep> waited_{0};

  base::Mutex mutex_;
  base::CondVar verdict_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool told_ ABSL_GUARDED_BY(mutex_) = false;
  bool watcher_left_ ABSL_GUARDED_BY(mutex_) = false;
  // There are buffers that others may wake.
  bool places_made_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the wait that a call is in.
  std::optional<Clock::time_point> deadline_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
