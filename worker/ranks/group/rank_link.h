// The interface through which a leader or follower sends messages on a
// follower's Join call.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace kvasir::worker {

// If more messages than this wait to be sent, the peer is not reading and
// counts as lost. Fewer heartbeats than this are sent in two heartbeat
// timeouts.
inline constexpr size_t kMaxWaitingMessages = 16;

// Threads: any thread may call any method. Calls do not block and invoke no
// callbacks.
class RankLink {
 public:
  // Shared, because the leader sends the same bytes on several links.
  using Bytes = std::shared_ptr<const std::string>;

  virtual ~RankLink() = default;

  // Queues a message. Does nothing once the call has ended. Returns the number
  // of messages that wait to be sent.
  virtual size_t Send(Bytes message) = 0;
  // Ends the call after all queued messages were sent; the other end receives
  // `status`. Call it once. Later messages are not sent.
  virtual void Close(const absl::Status& status) = 0;
};

}  // namespace kvasir::worker
