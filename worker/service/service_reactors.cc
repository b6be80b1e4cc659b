#include "worker/service/service_reactors.h"

#include <utility>

#include "base/net/grpc_status.h"
#include "proto/refusal.h"
#include "worker/service/convert.h"

namespace kvasir::worker {

std::shared_ptr<GenerateReactor> GenerateReactor::Make(Parts parts) {
  std::shared_ptr<GenerateReactor> reactor(
      new GenerateReactor(std::move(parts)));
  base::MutexLock lock(&reactor->mutex_);
  reactor->self_ = reactor;
  return reactor;
}

GenerateReactor::GenerateReactor(Parts parts)
    : parts_(std::move(parts)), stream_(parts_.max_queued_bytes) {}

void GenerateReactor::OnSubmitted(const Refusal& refusal) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnSubmitted(refusal);
  }
  Advance();
}

void GenerateReactor::OnAccepted(uint32_t prompt_tokens) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnAccepted(prompt_tokens);
  }
  AdvanceLater();
}

void GenerateReactor::OnTokens(
    const kvasir::v1::GenerateEvent::Tokens& tokens) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnTokens(tokens);
  }
  AdvanceLater();
}

void GenerateReactor::OnFinished(
    const kvasir::v1::GenerateEvent::Finish& finish, bool last) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnFinished(finish, last);
  }
  AdvanceLater();
}

void GenerateReactor::OnFailed(const Refusal& why) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnFailed(why);
  }
  AdvanceLater();
}

void GenerateReactor::OnWriteDone(bool ok) {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnWriteDone(ok);
  }
  Advance();
}

void GenerateReactor::OnCancel() {
  {
    base::MutexLock lock(&mutex_);
    stream_.OnCancel();
  }
  Advance();
}

void GenerateReactor::OnDone() {
  std::shared_ptr<GenerateReactor> self;
  base::MutexLock lock(&mutex_);
  self = std::move(self_);
}

void GenerateReactor::AdvanceLater() {
  {
    base::MutexLock lock(&mutex_);
    if (pushed_ || stream_.finished()) return;
    pushed_ = true;
  }
  parts_.pump->Push(shared_from_this());
}

void GenerateReactor::Advance() {
  // Keeps this object alive until Advance returns, although OnDone may release
  // it earlier on another thread.
  const std::shared_ptr<GenerateReactor> self = shared_from_this();
  mutex_.Lock();
  pushed_ = false;
  if (!advancing_) {
    advancing_ = true;
    while (std::optional<StreamAction> action = stream_.Next()) {
      mutex_.Unlock();
      Execute(*std::move(action));
      mutex_.Lock();
    }
    advancing_ = false;
  }
  mutex_.Unlock();
}

void GenerateReactor::Execute(StreamAction action) {
  switch (action.kind) {
    case StreamAction::Kind::kWrite:
      writing_ = std::move(action.event);
      StartWrite(&writing_);
      break;
    case StreamAction::Kind::kWriteAndFinish:
      writing_ = std::move(action.event);
      StartWriteAndFinish(&writing_, grpc::WriteOptions(), grpc::Status::OK);
      break;
    case StreamAction::Kind::kFinish:
      End(action.end);
      break;
    case StreamAction::Kind::kReset:
      parts_.context->TryCancel();
      break;
    case StreamAction::Kind::kAbort:
      parts_.engine->Abort(parts_.request_id, parts_.attempt);
      break;
  }
}

void GenerateReactor::End(const Refusal& end) {
  const absl::Status status = ToStatus(end);
  if (const auto refusal = proto::RefusalOf(status)) {
    parts_.context->AddTrailingMetadata(proto::kRefusalMetadataKey,
                                        refusal->SerializeAsString());
  }
  Finish(base::ToGrpcStatus(status));
}

std::shared_ptr<WatchLoadReactor> WatchLoadReactor::Make() {
  std::shared_ptr<WatchLoadReactor> reactor(new WatchLoadReactor);
  base::MutexLock lock(&reactor->mutex_);
  reactor->self_ = reactor;
  return reactor;
}

void WatchLoadReactor::OnReport(const LoadSnapshot& load) {
  {
    base::MutexLock lock(&mutex_);
    next_ = ToLoadReport(load);
  }
  Advance();
}

void WatchLoadReactor::OnClosed() {
  {
    base::MutexLock lock(&mutex_);
    end_ = grpc::Status(grpc::StatusCode::UNAVAILABLE,
                        "the worker is shutting down");
  }
  Advance();
}

void WatchLoadReactor::OnWriteDone(bool ok) {
  {
    base::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok && !end_.has_value()) end_ = grpc::Status::CANCELLED;
  }
  Advance();
}

void WatchLoadReactor::OnCancel() {
  {
    base::MutexLock lock(&mutex_);
    if (!end_.has_value()) end_ = grpc::Status::CANCELLED;
  }
  Advance();
}

void WatchLoadReactor::OnDone() {
  std::shared_ptr<WatchLoadReactor> self;
  base::MutexLock lock(&mutex_);
  self = std::move(self_);
}

void WatchLoadReactor::Advance() {
  const kvasir::v1::LoadReport* write = nullptr;
  grpc::Status end;
  {
    base::MutexLock lock(&mutex_);
    if (writing_ || finished_) return;
    if (end_.has_value()) {
      finished_ = true;
      end = *end_;
    } else if (next_.has_value()) {
      writing_ = true;
      writing_report_ = *std::move(next_);
      next_.reset();
      write = &writing_report_;
    } else {
      return;
    }
  }
  if (write != nullptr) {
    StartWrite(write);
  } else {
    Finish(end);
  }
}

}  // namespace kvasir::worker
