// Writes a call's responses one at a time. While one is being written, new
// output waits in the source, which then puts all of it into the next response.
// Uses no gRPC and no threads.
#pragma once

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Sends a call's responses to the client; gRPC reactors implement it.
// Every method starts an operation and returns at once. No method is
// called after End.
template <typename Response>
class CallWriter {
 public:
  virtual ~CallWriter() = default;
  // Writes a response. When it is written, the transport calls the pump's
  // OnWritten. Write is not called again before that.
  virtual void Write(Response response) = 0;
  // Makes the write that is in progress fail.
  virtual void Reset() = 0;
  // Ends the call. Called exactly once, when no write is outstanding.
  virtual void End(const absl::Status& status) = 0;
};

template <typename Response>
class ResponseSource {
 public:
  virtual ~ResponseSource() = default;
  virtual std::optional<Response> NextResponse() = 0;
  // Returns the call's final status if no more responses will come,
  // otherwise nullopt.
  virtual std::optional<absl::Status> EndOfCall() = 0;
  // Called when the call ends early. An implementation must cancel the running
  // requests of the call and drop waiting output.
  virtual void GiveUp(CancelReason reason) = 0;
  // An implementation must post a task that calls the pump's OnPumpTurn. It
  // must run after the tasks of all events that have already arrived, so that
  // their output is written together.
  virtual void PostPumpTurn() = 0;
};

// Takes responses from a source and passes them to a writer.
// Threads: used only on the call's strand, so by one thread at a time.
template <typename Response>
class ResponsePump {
 public:
  // `source` and `writer` must outlive the pump.
  ResponsePump(ResponseSource<Response>* source, CallWriter<Response>* writer)
      : source_(source), writer_(writer) {}

  bool ended() const { return ended_; }
  // True if the call has ended, or will end as soon as the current write has
  // finished. Nothing new may be started then.
  bool ending() const { return ended_ || end_status_.has_value(); }

  void Pump() {
    if (ended_ || writing_) return;
    if (end_status_) return End(*end_status_);
    if (auto response = source_->NextResponse()) {
      writing_ = true;
      writer_->Write(*std::move(response));
      return;
    }
    if (const auto status = source_->EndOfCall()) End(*status);
  }

  void PumpSoon() {
    if (turn_posted_) return;
    turn_posted_ = true;
    source_->PostPumpTurn();
  }
  void OnPumpTurn() {
    turn_posted_ = false;
    Pump();
  }

  void OnWritten(bool ok) {
    writing_ = false;
    if (!ok) {
      EndCall(absl::CancelledError("the client closed the connection"),
              CancelReason::kClient);
    }
    Pump();
  }

  // Ends the call as soon as the current write, if any, has finished. If it is
  // called more than once, the first status counts.
  void EndCall(const absl::Status& status, CancelReason reason) {
    if (ended_) return;
    if (!end_status_) end_status_ = status;
    source_->GiveUp(reason);
    Pump();
  }

  // Ends the call if more than `limit` bytes wait because the client does not
  // read them.
  void CheckWaiting(size_t waiting, size_t limit) {
    if (ending() || !writing_ || waiting <= limit) return;
    EndCall(
        absl::ResourceExhaustedError(absl::StrCat(
            "the client reads too slowly: ", waiting,
            " bytes of responses wait to be sent, and the limit is ", limit)),
        CancelReason::kSlowReader);
    if (!ended_) writer_->Reset();
  }

 private:
  void End(const absl::Status& status) {
    ended_ = true;
    writer_->End(status);
  }

  ResponseSource<Response>* const source_;
  CallWriter<Response>* const writer_;
  bool writing_ = false;
  bool turn_posted_ = false;
  bool ended_ = false;
  std::optional<absl::Status> end_status_;
};

}  // namespace kvasir::router
