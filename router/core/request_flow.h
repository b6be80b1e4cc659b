// The state machine of one request over its attempts, without threads, clocks
// or gRPC. It decides what a worker's answer means, what the client receives
// and what is logged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/base/canonical.h"
#include "router/core/access_log.h"

namespace kvasir::router {

// Keeps what another replica needs to continue: the request, its seed and the
// tokens that the client already has.
//
// Threads: one at a time (the caller's mutex).
class RequestFlow {
 public:
  // `request` must be complete: seed drawn, max_tokens set.
  RequestFlow(CanonicalRequest request, std::string id, int max_attempts,
              absl::Time now);

  const CanonicalRequest& request() const { return request_; }
  const std::string& id() const { return id_; }
  // The ids that the client has, little-endian; only for requests with n = 1.
  const std::string& emitted() const { return emitted_; }

  // Returns true if this is the first reason, which counts.
  bool Cancel(CancelReason reason);
  bool cancelled() const { return cancel_reason_.has_value(); }

  // A stream to `replica` is about to be opened.
  void OnAttempt(const std::string& replica, absl::Time now);
  uint32_t attempts() const { return attempts_; }
  // The engine has produced output.
  bool delivered() const { return delivered_; }
  // Replicas that have been asked. None is asked twice.
  const std::vector<std::string>& tried() const { return tried_; }

  // The effect of an event on the client.
  struct Delivery {
    bool deliver = false;
    // The worker broke the contract; its stream must be reset.
    bool reset_attempt = false;
    // Set with the first tokens of the request.
    std::optional<absl::Duration> time_to_first_token;
    // Set with later tokens: the time since the same sample's last tokens.
    std::optional<absl::Duration> inter_token;
  };
  Delivery OnEvent(const kvasir::v1::GenerateEvent& event, absl::Time now);

  // An attempt has ended. Returns nothing if another replica must be asked,
  // otherwise the request's end.
  std::optional<absl::Status> OnAttemptDone(const absl::Status& status,
                                            absl::Time now);
  // Returns the rest of the request's own queue timeout; nothing if it has
  // none.
  std::optional<absl::Duration> QueueTimeoutLeft(absl::Time now) const;
  // No other replica can be asked. Returns the last replica's error, or
  // `otherwise`.
  absl::Status NoReplica(const absl::Status& otherwise) const;

  // The status of a cancelled request.
  absl::Status CancelledStatus() const;
  AccessRecord Record(const absl::Status& status, absl::Time now) const;

 private:
  struct Sample {
    bool finished = false;
    uint64_t num_tokens = 0;
    absl::Time last_tokens = absl::InfinitePast();
  };

  Delivery OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens,
                    absl::Time now);
  Delivery OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Returns null for a sample that was not requested or has finished. A
  // worker's error must not reach the client, nor memory beyond the samples.
  Sample* RunningSample(uint32_t index);
  bool Retryable(const absl::Status& status, absl::Time now) const;
  // Another worker can continue from the tokens that the sink has, without a
  // visible difference.
  bool MayContinue() const;
  // There is no output yet, and the client's own timeout is over.
  bool TimedOut(absl::Time now) const;
  std::string FinishReasonName(const absl::Status& status) const;

  const CanonicalRequest request_;
  const std::string id_;
  const int max_attempts_;
  const absl::Time start_;

  std::optional<CancelReason> cancel_reason_;
  uint32_t attempts_ = 0;
  std::vector<std::string> tried_;
  absl::Status last_error_;
  // How the worker broke the contract. Its later events are ignored.
  absl::Status breach_;
  absl::Time first_attempt_ = absl::InfiniteFuture();
  absl::Time first_token_ = absl::InfiniteFuture();
  bool accepted_ = false;
  // The sink has received output: no other replica is tried unless MayContinue.
  bool delivered_ = false;
  std::vector<Sample> samples_;
  std::string emitted_;
  uint32_t output_tokens_ = 0;
  uint32_t cached_tokens_ = 0;
  kvasir::v1::FinishReason finish_reason_ =
      kvasir::v1::FINISH_REASON_UNSPECIFIED;
};

}  // namespace kvasir::router
