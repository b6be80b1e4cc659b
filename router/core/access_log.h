// One line per request: who, how much, how long, how it ended. Never what was
// written: no prompt, no token ids, no salts.
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
  // Which of the tenant's callers: a token's label, or a certificate's name.
  std::string caller;
  std::string model;
  // Of the last attempt; empty if it was sent to none.
  std::string replica;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  uint32_t cached_tokens = 0;
  uint32_t samples = 0;
  // Streams opened to workers.
  uint32_t attempts = 0;
  // Submit to the first attempt; infinite if there was none.
  absl::Duration queue = absl::InfiniteDuration();
  // Submit to the first token; infinite if there was none.
  absl::Duration time_to_first_token = absl::InfiniteDuration();
  absl::Duration duration;
  // stop, length; or cancelled, slow_reader, shutdown, deadline,
  // refused, lost, error.
  std::string finish_reason;
  absl::Status status;
  // Of the status, in one word: of a caller, or a quota, that is refused.
  std::string reason;
  std::string traceparent;
};

// Threads: any thread, several at once. Must not block.
class AccessLogSink {
 public:
  virtual ~AccessLogSink() = default;
  virtual void Write(const AccessRecord& record) = 0;
};

// One line through base/log.h. Callers whom nobody knows have one a minute for
// each reason, with nothing in it that they wrote: they are counted all.
class LogAccess final : public AccessLogSink {
 public:
  explicit LogAccess(const base::Clock& clock = base::Clock::Real())
      : strangers_(clock) {}
  void Write(const AccessRecord& record) override;

 private:
  base::LogLimit strangers_;
};

}  // namespace kvasir::router
