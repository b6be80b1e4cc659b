// The state machine of one Generate call, without gRPC: the engine's and the
// transport's events go in, what to do next comes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "proto/kvasir/v1/worker.pb.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

struct StreamAction {
  enum class Kind {
    kWrite,           // send `event`; answered by OnWriteDone
    kWriteAndFinish,  // send `event`, end the call with OK
    kFinish,          // end the call with `end`
    kReset,           // make the transport give up the write in flight
    kAbort,           // tell the engine to end the request
  };
  Kind kind = Kind::kFinish;
  kvasir::v1::GenerateEvent event;
  Refusal end;
};

// One write is in flight at a time. What arrives meanwhile is coalesced: tokens
// of one sample become one event. The queue is bounded in bytes: a reader too
// slow is reset and its request aborted, so that it never holds pages.
//
// Whoever calls an On... method then takes actions from Next() until there is
// none, and carries each out before it asks for the next. Guarantees: exactly
// one of kFinish and kWriteAndFinish, never while a write is in flight, and
// after it nothing that touches the call; kAbort at most once, only while the
// engine still runs the request.
//
// Threads: one at a time (the caller's mutex).
// Units: bytes are an upper estimate of the serialized size.
class GenerateStream {
 public:
  explicit GenerateStream(size_t max_queued_bytes)
      : max_queued_bytes_(max_queued_bytes) {}

  // What Engine::Submit answered. May come after any other event.
  void OnSubmitted(const Refusal& refusal);
  void OnAccepted(uint32_t prompt_tokens);
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish, bool last);
  void OnFailed(const Refusal& why);

  void OnWriteDone(bool ok);
  // Reset by the peer, deadline passed, or connection lost.
  void OnCancel();

  std::optional<StreamAction> Next();

  bool finished() const { return finished_; }
  size_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Queued {
    kvasir::v1::GenerateEvent event;
    size_t bytes = 0;
  };

  // The queue's last event of tokens that more tokens of this sample may join;
  // null where a new one is needed.
  Queued* OpenTokens(uint32_t index);
  void Append(kvasir::v1::GenerateEvent event, size_t bytes);
  // May drop the queue: no reference into it survives this.
  void Count(size_t bytes);
  void Break(const Refusal& why);
  StreamAction TakeWrite();

  const size_t max_queued_bytes_;
  std::deque<Queued> queue_;
  size_t queued_bytes_ = 0;
  bool submitted_ = false;
  bool writing_ = false;
  bool engine_ended_ = false;
  // The call is lost: nothing more is written.
  bool broken_ = false;
  bool abort_wanted_ = false;
  bool reset_wanted_ = false;
  bool finished_ = false;
  // How the call ends, once engine_ended_ or broken_.
  Refusal end_;
};

}  // namespace kvasir::worker
