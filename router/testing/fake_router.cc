#include "router/testing/fake_router.h"

#include "absl/strings/str_cat.h"

namespace kvasir::router {

FakeRouter::Request::Request(std::string id, CanonicalRequest request,
                             std::shared_ptr<RequestSink> sink)
    : id_(std::move(id)),
      request_(std::move(request)),
      sink_(std::move(sink)) {}

void FakeRouter::Request::Cancel(CancelReason reason) {
  base::MutexLock lock(&mutex_);
  if (!cancelled_) reason_ = reason;
  cancelled_ = true;
}

bool FakeRouter::Request::cancelled() const {
  base::MutexLock lock(&mutex_);
  return cancelled_;
}

CancelReason FakeRouter::Request::reason() const {
  base::MutexLock lock(&mutex_);
  return reason_;
}

void FakeRouter::Request::Emit(const std::string& text, uint32_t index) {
  kvasir::v1::GenerateEvent::Tokens tokens;
  tokens.set_index(index);
  for (const char c : text) {
    tokens.add_token_ids(static_cast<unsigned char>(c));
    tokens.add_logprobs()->set_logprob(-0.5f);
  }
  sink_->OnTokens(tokens);
}

void FakeRouter::Request::Finish(kvasir::v1::FinishReason reason,
                                 uint32_t index) {
  kvasir::v1::GenerateEvent::Finish finish;
  finish.set_index(index);
  finish.set_reason(reason);
  sink_->OnFinish(finish);
}

void FakeRouter::Request::Done(const absl::Status& status) {
  sink_->OnDone(status);
  sink_.reset();
}

void FakeRouter::Request::Complete(const std::string& text) {
  Emit(text);
  Finish();
  Done();
}

FakeRouter::FakeRouter() {
  model_.name = "tiny";
  model_.ready = true;
  model_.num_replicas = 1;
  model_.num_ready_replicas = 1;
  model_.info.emplace();
  model_.info->set_max_model_len(1024);
  model_.info->add_eos_token_ids(256);
}

absl::StatusOr<std::shared_ptr<RequestHandle>> FakeRouter::Submit(
    CanonicalRequest request, std::shared_ptr<RequestSink> sink) {
  base::MutexLock lock(&mutex_);
  if (!refusal_.ok()) return refusal_;
  auto handle = std::make_shared<Request>(absl::StrCat("k", requests_.size()),
                                          std::move(request), std::move(sink));
  requests_.push_back(handle);
  arrived_.SignalAll();
  return std::shared_ptr<RequestHandle>(handle);
}

void FakeRouter::LogRefused(CanonicalRequest request, const absl::Status& why) {
  base::MutexLock lock(&mutex_);
  refused_.emplace_back(std::move(request), why);
}

absl::StatusOr<ModelStatus> FakeRouter::Model(const std::string& name) const {
  if (name == model_.name) return model_;
  return absl::NotFoundError(
      absl::StrCat("model '", name, "' is unknown; served: ", model_.name));
}

RouterHealth FakeRouter::Health() const {
  return {RouterState::kReady, model_.ready, ""};
}

void FakeRouter::Refuse(const absl::Status& refusal) {
  base::MutexLock lock(&mutex_);
  refusal_ = refusal;
}

void FakeRouter::SetMaxModelLen(uint32_t tokens) {
  model_.info->set_max_model_len(tokens);
}

std::vector<std::pair<CanonicalRequest, absl::Status>> FakeRouter::refused()
    const {
  base::MutexLock lock(&mutex_);
  return refused_;
}

size_t FakeRouter::num_requests() const {
  base::MutexLock lock(&mutex_);
  return requests_.size();
}

std::shared_ptr<FakeRouter::Request> FakeRouter::WaitFor(size_t index) {
  base::MutexLock lock(&mutex_);
  while (requests_.size() <= index) {
    if (arrived_.WaitWithTimeout(&mutex_, absl::Seconds(20))) return nullptr;
  }
  return requests_[index];
}

}  // namespace kvasir::router
