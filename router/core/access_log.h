// The access log: one line for each request, with its caller, sizes, times and
// how it ended. It never contains prompts, outputs, token ids or salts.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/log_limit.h"

namespace kvasir::router {

struct AccessRecord {
  absl::Time start;
  std::string request_id;
  std::string client_request_id;
  std::string facade;
  std::string peer;
  std::string tenant;
  // Identifies the caller within its tenant: a token's label, or a
  // certificate's name.
  std::string caller;
  std::string model;
  // The last replica that was asked to run the request; empty if none
  // was asked.
  std::string replica;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  uint32_t cached_tokens = 0;
  uint32_t samples = 0;
  // How many streams to workers the router has opened for the request.
  uint32_t attempts = 0;
  // The time from Submit to the first attempt; infinite if there was
  // no attempt.
  absl::Duration queue = absl::InfiniteDuration();
  // The time from Submit to the first token; infinite if there was no token.
  absl::Duration time_to_first_token = absl::InfiniteDuration();
  absl::Duration duration;
  // One word that says how the request ended: "stop" or "length" if it is
  // complete; otherwise "cancelled", "slow_reader", "shutdown", "deadline",
  // "refused", "lost" or "error".
  std::string finish_reason;
  absl::Status status;
  // One word that says why the caller was refused, or which limit of its quota
  // the request exceeded; otherwise empty.
  std::string reason;
  std::string traceparent;
};

// Receives a record when a request has ended or is refused.
// Threads: several threads may call methods at once. A call must not block.
class AccessLogSink {
 public:
  virtual ~AccessLogSink() = default;
  virtual void Write(const AccessRecord& record) = 0;
};

// Writes one line for each record through base/log.h. Unknown callers cannot
// flood the log: they get one line a minute for each reason, and the line
// contains no text that they sent. All of their requests are counted.
class LogAccess final : public AccessLogSink {
 public:
  explicit LogAccess(const base::Clock& clock = base::Clock::Real())
      : strangers_(clock) {}
  void Write(const AccessRecord& record) override;

 private:
  base::LogLimit strangers_;
};

}  // namespace kvasir::router
