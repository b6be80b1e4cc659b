#include "worker/service/generate_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {
namespace {

// An upper limit of an event's serialized size without its tokens.
constexpr size_t kEventBytes = 64;

}  // namespace

void GenerateStream::OnSubmitted(const Refusal& refusal) {
  submitted_ = true;
  if (!refusal.ok()) OnFailed(refusal);
}

void GenerateStream::OnAccepted(uint32_t prompt_tokens) {
  if (broken_) return;
  kvasir::v1::GenerateEvent event;
  event.mutable_accepted()->set_prompt_tokens(prompt_tokens);
  Append(std::move(event), kEventBytes);
}

void GenerateStream::OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) {
  if (broken_) return;
  const size_t bytes = tokens.ByteSizeLong();
  if (Queued* open = OpenTokens(tokens.index())) {
    open->event.mutable_tokens()->MergeFrom(tokens);
    open->bytes += bytes;
    Count(bytes);
    return;
  }
  kvasir::v1::GenerateEvent event;
  *event.mutable_tokens() = tokens;
  Append(std::move(event), kEventBytes + bytes);
}

void GenerateStream::OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                                bool last) {
  if (last) engine_ended_ = true;
  if (broken_) return;
  kvasir::v1::GenerateEvent event;
  *event.mutable_finish() = finish;
  Append(std::move(event), kEventBytes);
}

void GenerateStream::OnFailed(const Refusal& why) {
  engine_ended_ = true;
  if (!broken_) end_ = why;
}

void GenerateStream::OnWriteDone(bool ok) {
  writing_ = false;
  reset_wanted_ = false;
  if (!ok) OnCancel();
}

void GenerateStream::OnCancel() {
  Break({absl::CancelledError("the call was cancelled"),
         kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
}

std::optional<StreamAction> GenerateStream::Next() {
  // The engine can abort the request only after Submit has returned. So the
  // abort waits for OnSubmitted, which may come after the call has ended.
  if (abort_wanted_ && submitted_) {
    abort_wanted_ = false;
    if (!engine_ended_) return StreamAction{StreamAction::Kind::kAbort, {}, {}};
  }
  if (finished_) return std::nullopt;
  if (reset_wanted_) {
    reset_wanted_ = false;
    return StreamAction{StreamAction::Kind::kReset, {}, {}};
  }
  if (writing_) return std::nullopt;
  if (!broken_ && !queue_.empty()) return TakeWrite();
  if (!broken_ && !engine_ended_) return std::nullopt;
  finished_ = true;
  return StreamAction{StreamAction::Kind::kFinish, {}, end_};
}

StreamAction GenerateStream::TakeWrite() {
  StreamAction action{StreamAction::Kind::kWrite, {}, {}};
  action.event = std::move(queue_.front().event);
  queued_bytes_ -= queue_.front().bytes;
  queue_.pop_front();
  if (queue_.empty() && engine_ended_ && end_.ok()) {
    action.kind = StreamAction::Kind::kWriteAndFinish;
    finished_ = true;
  } else {
    writing_ = true;
  }
  return action;
}

GenerateStream::Queued* GenerateStream::OpenTokens(uint32_t index) {
  // Events of different samples may be reordered, so the search skips events of
  // other samples. A request has few samples, so the search is short.
  for (auto queued = queue_.rbegin(); queued != queue_.rend(); ++queued) {
    if (!queued->event.has_tokens()) return nullptr;
    if (queued->event.tokens().index() == index) return &*queued;
  }
  return nullptr;
}

void GenerateStream::Append(kvasir::v1::GenerateEvent event, size_t bytes) {
  queue_.push_back({std::move(event), bytes});
  Count(bytes);
}

void GenerateStream::Count(size_t bytes) {
  queued_bytes_ += bytes;
  if (queued_bytes_ <= max_queued_bytes_) return;
  Break({absl::ResourceExhaustedError(absl::StrCat(
             "the client reads too slowly: ", queued_bytes_,
             " bytes are queued, the limit is ", max_queued_bytes_)),
         kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
  reset_wanted_ = writing_;
}

void GenerateStream::Break(const Refusal& why) {
  if (broken_ || finished_) return;
  broken_ = true;
  end_ = why;
  queue_.clear();
  queued_bytes_ = 0;
  abort_wanted_ = true;
}

}  // namespace kvasir::worker
