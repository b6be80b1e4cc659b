// One end of a follower's call to its leader.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace kvasir::worker {

// More messages than ever wait for a peer that reads: the heartbeats of more
// than two timeouts. A peer that lets so many wait counts as lost.
inline constexpr size_t kMaxWaitingMessages = 16;

// Threads: any. The calls do not block, and call nothing back.
class RankLink {
 public:
  // Shared by all links that a message goes to.
  using Bytes = std::shared_ptr<const std::string>;

  virtual ~RankLink() = default;

  // Sends after what was sent before. Does nothing once the call has ended.
  // Returns the number of messages that wait.
  virtual size_t Send(Bytes message) = 0;
  // Ends the call after everything sent before. Call it once; nothing is sent
  // afterwards. `status` is for the other end.
  virtual void Close(const absl::Status& status) = 0;
};

}  // namespace kvasir::worker
