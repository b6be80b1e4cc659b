// The state machine of a request with all its attempts. It decides how the
// router reacts to workers' events, what the client receives and what is
// logged. It uses no threads, clocks or gRPC.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/token_bytes.h"
#include "router/base/canonical.h"
#include "router/core/access_log.h"
#include "router/core/admission.h"

namespace kvasir::router {

// Whether a stream may go on at another replica after its client has received
// tokens.
enum class MoveStreams {
  kOff,
  kExact,  // yes: the replica continues it with the same tokens
  // Yes, but rounding may differ, and so the tokens from there on. Streams that
  // the replica would have to generate again from the start do not move.
  kRounding,
};

const char* MoveStreamsName(MoveStreams moves);

// Returns how a stream that began at this worker may go on at an equal one if
// the operator allows `allowed`. Its bits stay the same except on GPUs, whose
// arithmetic may depend on the batch, and with plans that compute prompt and
// output tokens differently.
MoveStreams MovesFrom(MoveStreams allowed, const kvasir::v1::WorkerInfo& info);

// Why a request left a replica.
enum class MoveReason {
  kLost,     // the connection broke
  kHung,     // see Liveness
  kDrained,  // the worker drains
  kAborted,  // the worker ended the stream before its samples had finished
  kRefused,  // the worker was full
};
const char* MoveReasonName(MoveReason reason);

// The state of one request. It contains all that another replica needs to
// continue the request: the request itself, its seed and the tokens that have
// been delivered.
// Threads: only one thread at a time may use it. Its owner has a mutex
// for this.
class RequestFlow {
 public:
  // The seed and max_tokens of `request` must be set.
  RequestFlow(CanonicalRequest request, std::string id, int max_attempts,
              absl::Time now);

  const CanonicalRequest& request() const { return request_; }
  const std::string& id() const { return id_; }
  absl::Time arrival() const { return start_; }
  // The ids of the delivered tokens, as little-endian uint32. Empty if another
  // worker cannot continue from them.
  std::string emitted() const {
    return ContinuesFromTokens() ? samples_[0].emitted : std::string();
  }

  // Returns true for the first call; later calls have no effect. If a client
  // cancels at about its deadline, its deadline counts as passed, because
  // gRPC's clients cancel their calls at the deadline.
  bool Cancel(CancelReason reason, absl::Time now);
  bool cancelled() const { return cancel_reason_.has_value(); }

  // Call before a stream to `replica` is opened. `moves` says whether a stream
  // may move if this replica is lost. `connection` is the
  // number of the connection to it.
  void OnAttempt(const std::string& replica, absl::Time now,
                 MoveStreams moves = MoveStreams::kOff,
                 uint64_t connection = 0);
  uint32_t attempts() const { return attempts_; }
  MoveReason move_reason() const { return move_reason_; }
  // How many tokens a replica that goes on with the request must prefill. A
  // request is sent at most max_attempts times, so in all its moves together
  // these are at most max_attempts - 1 times the longest sequence.
  uint64_t tokens_to_prefill() const {
    return request_.prompt.size_tokens() +
           (ContinuesFromTokens() ? output_tokens_ : 0);
  }
  // The bytes of the delivered tokens, which are kept so that another replica
  // can go on. They also count in request().bytes.
  int64_t kept_bytes() const {
    return int64_t{output_tokens_} * proto::kBytesPerTokenId;
  }
  bool delivered() const { return delivered_; }
  // Returns true if the replica has been asked to run the request since this
  // connection to it began. No replica is asked twice in one connection. A
  // worker that was lost and has come back may be asked again.
  bool Tried(const std::string& replica, uint64_t connection) const;
  // Returns true if the request waits when no replica can be asked: it has not
  // been tried, it has output, or it has lost its worker. A request that
  // every replica has refused does not wait.
  bool Waits() const { return tried_.empty() || delivered_ || lost_; }
  Admission::Waiting waiting() const {
    return {.arrival = start_, .since = waits_since_, .begun = delivered_};
  }

  // The replica of the current attempt hangs. Returns true if the attempt must
  // be reset, so that another replica is asked. `blamed` is true if the request
  // may be the cause; then this counts as a worker that died of it.
  bool Leave(bool blamed, absl::Time now);

  // How the router must react to an event from a worker.
  struct Delivery {
    bool deliver = false;  // pass the event to the sink
    // How many of the event's first tokens an earlier attempt has delivered.
    size_t repeated_tokens = 0;
    // True if the worker has broken its protocol, and its stream must be reset.
    bool reset_attempt = false;
    // Set if these are the first tokens of the request.
    std::optional<absl::Duration> time_to_first_token;
    // The time since the sample's previous tokens; not set for its
    // first tokens.
    std::optional<absl::Duration> inter_token;
  };
  Delivery OnEvent(const kvasir::v1::GenerateEvent& event, absl::Time now);

  // Call when an attempt has ended. Returns nullopt if another replica must be
  // asked, otherwise the status with which the request ends.
  std::optional<absl::Status> OnAttemptDone(const absl::Status& status,
                                            absl::Time now);
  // Returns how much of the request's own queue timeout is left. nullopt if the
  // request has no such timeout, or if a worker has begun to run it.
  std::optional<absl::Duration> QueueTimeoutLeft(absl::Time now) const;
  // Returns the status of a request for which no other replica can be asked. It
  // is the error of the last attempt, or `otherwise` if there was no attempt or
  // if a deadline passed.
  absl::Status NoReplica(const absl::Status& otherwise) const;

  absl::Status CancelledStatus() const;
  AccessRecord Record(const absl::Status& status, absl::Time now) const;

 private:
  struct Sample {
    bool finished = false;
    // The ids of the tokens that all attempts together have delivered, as
    // little-endian uint32.
    std::string emitted;
    // How many of the emitted tokens the current attempt still has to
    // generate again.
    uint64_t to_repeat = 0;
    uint64_t num_tokens() const {
      return emitted.size() / proto::kBytesPerTokenId;
    }
    absl::Time last_tokens = absl::InfinitePast();
  };

  Delivery OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens,
                    absl::Time now);
  Delivery OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Returns null if the sample was not requested or has already finished. The
  // index must be checked, because a faulty worker may send any index.
  Sample* RunningSample(uint32_t index);
  // Compares tokens that this worker generates again with those that an earlier
  // attempt has delivered. Returns an error if they differ.
  absl::Status TakeRepeated(absl::Span<const int32_t> ids, Sample* sample);
  // `lost_workers` is the number of workers that were lost, including the
  // present one.
  bool Retryable(const absl::Status& status, int lost_workers,
                 absl::Time now) const;
  // Why the present attempt ends with this status of its call.
  MoveReason ReasonOf(const absl::Status& status) const;
  // Returns true if another worker can continue from the delivered tokens. If
  // not, it generates them again, and the router drops them. A worker cannot
  // continue several samples, or a request for prompt log probabilities.
  bool ContinuesFromTokens() const;
  // Returns true if another worker may be asked after the client of a stream
  // has received tokens.
  bool StreamMoves() const {
    return moves_ == MoveStreams::kExact ||
           (moves_ == MoveStreams::kRounding && ContinuesFromTokens());
  }
  // Returns true if there is no output yet and the client's own timeout
  // has passed.
  bool TimedOut(absl::Time now) const;
  std::string FinishReasonName(const absl::Status& status) const;

  const CanonicalRequest request_;
  const std::string id_;
  const int max_attempts_;
  const absl::Time start_;
  absl::Time waits_since_;  // the arrival, or the end of the last attempt

  std::optional<CancelReason> cancel_reason_;
  bool cancelled_at_deadline_ = false;
  uint32_t attempts_ = 0;
  static constexpr uint64_t kNoConnection = ~uint64_t{0};
  struct Asked {
    std::string replica;
    uint64_t connection = 0;
  };
  std::vector<Asked> tried_;
  absl::Status last_error_;
  // An error if the worker has broken the protocol. Then its later events
  // are ignored.
  absl::Status breach_;
  absl::Time first_attempt_ = absl::InfiniteFuture();
  absl::Time first_token_ = absl::InfiniteFuture();
  bool accepted_ = false;
  // True if the sink has received output. Another replica may then be asked
  // only if the client gets the whole answer in one response, or if `moves_`
  // allows it.
  bool delivered_ = false;
  MoveStreams moves_ = MoveStreams::kOff;
  // True after the first event of the current attempt.
  bool attempt_began_ = false;
  // True if the current attempt was reset because its replica hangs.
  bool left_ = false;
  bool blamed_ = false;
  MoveReason move_reason_ = MoveReason::kLost;  // of the last attempt
  // How many workers were lost after they had accepted the request. The request
  // may be the cause.
  int lost_workers_ = 0;
  bool lost_ = false;  // the last attempt ended because its worker was lost
  std::vector<Sample> samples_;
  uint32_t output_tokens_ = 0;
  uint32_t cached_tokens_ = 0;
  kvasir::v1::FinishReason finish_reason_ =
      kvasir::v1::FINISH_REASON_UNSPECIFIED;
};

}  // namespace kvasir::router
