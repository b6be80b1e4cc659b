// The state machine of one Generate call, without gRPC. Its inputs are events
// from the engine and from the transport; its outputs are the actions that the
// caller must carry out.
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
    kWrite,           // send `event`, then call OnWriteDone
    kWriteAndFinish,  // send `event` and end the call with OK
    kFinish,          // end the call with `end`
    kReset,           // make gRPC cancel the write in flight
    kAbort,           // make the engine abort the request
  };
  Kind kind = Kind::kFinish;
  kvasir::v1::GenerateEvent event;
  Refusal end;
};

// One write is in flight at a time. Tokens of one sample that arrive during a
// write are merged into one event. The queue is bounded in bytes. If a client
// reads too slowly, its call is reset and its request is aborted. Otherwise the
// request would hold cache pages for ever.
//
// After each On... call the caller takes actions from Next() until there are
// none. It carries out each action before it asks for the next. Guarantees:
// - There is exactly one kFinish or kWriteAndFinish, never while a write is in
//   flight. No later action touches the call.
// - There is at most one kAbort, and only while the engine runs the request.
//
// Threads: one thread at a time may call methods, so callers hold a mutex.
// Units: byte counts are an upper estimate of the serialized size.
class GenerateStream {
 public:
  explicit GenerateStream(size_t max_queued_bytes)
      : max_queued_bytes_(max_queued_bytes) {}

  // Called with the result of Engine::Submit. Events of the engine or of the
  // transport may arrive before this call.
  void OnSubmitted(const Refusal& refusal);
  void OnAccepted(uint32_t prompt_tokens);
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish, bool last);
  void OnFailed(const Refusal& why);

  void OnWriteDone(bool ok);
  // The client reset the call, the call's deadline passed, or the connection
  // broke.
  void OnCancel();

  std::optional<StreamAction> Next();

  bool finished() const { return finished_; }
  size_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Queued {
    kvasir::v1::GenerateEvent event;
    size_t bytes = 0;
  };

  // Returns the queued event to which more tokens of this sample may be added,
  // or null if a new event is needed.
  Queued* OpenTokens(uint32_t index);
  void Append(kvasir::v1::GenerateEvent event, size_t bytes);
  // Adds to the number of queued bytes. If it exceeds the bound, clears the
  // queue, which invalidates references to queued events.
  void Count(size_t bytes);
  void Break(const Refusal& why);
  StreamAction TakeWrite();

  const size_t max_queued_bytes_;
  std::deque<Queued> queue_;
  size_t queued_bytes_ = 0;
  bool submitted_ = false;
  bool writing_ = false;
  bool engine_ended_ = false;
  // True if nothing more can be written, because the client cancelled the call
  // or the queue exceeded its bound.
  bool broken_ = false;
  bool abort_wanted_ = false;
  bool reset_wanted_ = false;
  bool finished_ = false;
  // The call's final status. Valid once engine_ended_ or broken_ is true.
  Refusal end_;
};

}  // namespace kvasir::worker
