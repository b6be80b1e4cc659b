// One side's end of a follower's call to its leader.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace kvasir::worker {

// More messages than ever wait for a side that reads: heartbeats of more than
// two timeouts. Who lets so many wait is lost.
inline constexpr size_t kMaxWaitingMessages = 16;

// Threads: any; neither call blocks, nor calls back.
class RankLink {
 public:
  // Shared by the links that one message goes to.
  using Bytes = std::shared_ptr<const std::string>;

  virtual ~RankLink() = default;

  // Goes out behind what was sent before. Lost once the call has ended. Returns
  // how many messages wait.
  virtual size_t Send(Bytes message) = 0;
  // Ends the call behind what was sent. Once; nothing is sent afterwards.
  // `status` is for the other side.
  virtual void Close(const absl::Status& status) = 0;
};

}  // namespace kvasir::worker
