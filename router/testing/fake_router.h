// A RequestRouter whose engine is the test: what was submitted is recorded,
// and the test says which tokens come.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "router/canonical.h"

namespace kvasir::router {

// Threads: any thread. Sinks are called by whoever calls Emit, End, ...
class FakeRouter final : public RequestRouter {
 public:
  class Request final : public RequestHandle {
   public:
    Request(std::string id, CanonicalRequest request,
            std::shared_ptr<RequestSink> sink)
        : id_(std::move(id)),
          request_(std::move(request)),
          sink_(std::move(sink)) {}

    const std::string& id() const override { return id_; }
    void Cancel(CancelReason reason) override {
      base::MutexLock lock(&mutex_);
      if (!cancelled_) reason_ = reason;
      cancelled_ = true;
    }

    const CanonicalRequest& request() const { return request_; }
    bool cancelled() const {
      base::MutexLock lock(&mutex_);
      return cancelled_;
    }
    CancelReason reason() const {
      base::MutexLock lock(&mutex_);
      return reason_;
    }

    // The text's bytes as token ids.
    void Emit(const std::string& text, uint32_t index = 0) {
      kvasir::v1::GenerateEvent::Tokens tokens;
      tokens.set_index(index);
      for (const char c : text) {
        tokens.add_token_ids(static_cast<unsigned char>(c));
        tokens.add_logprobs()->set_logprob(-0.5f);
      }
      sink_->OnTokens(tokens);
    }
    void Finish(kvasir::v1::FinishReason reason = kvasir::v1::FINISH_LENGTH,
                uint32_t index = 0) {
      kvasir::v1::GenerateEvent::Finish finish;
      finish.set_index(index);
      finish.set_reason(reason);
      sink_->OnFinish(finish);
    }
    void Done(const absl::Status& status = absl::OkStatus()) {
      sink_->OnDone(status);
      sink_.reset();
    }
    // All of it at once.
    void Complete(const std::string& text) {
      Emit(text);
      Finish();
      Done();
    }

   private:
    const std::string id_;
    const CanonicalRequest request_;
    std::shared_ptr<RequestSink> sink_;
    mutable base::Mutex mutex_;
    bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
    CancelReason reason_ ABSL_GUARDED_BY(mutex_) = CancelReason::kClient;
  };

  FakeRouter() {
    model_.name = "tiny";
    model_.ready = true;
    model_.num_replicas = 1;
    model_.num_ready_replicas = 1;
    model_.info.emplace();
    model_.info->set_max_model_len(1024);
    model_.info->add_eos_token_ids(256);
  }

  absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) override {
    base::MutexLock lock(&mutex_);
    if (!refusal_.ok()) return refusal_;
    auto handle =
        std::make_shared<Request>(absl::StrCat("k", requests_.size()),
                                  std::move(request), std::move(sink));
    requests_.push_back(handle);
    arrived_.SignalAll();
    return std::shared_ptr<RequestHandle>(handle);
  }
  void LogRefused(CanonicalRequest request, const absl::Status& why) override {
    base::MutexLock lock(&mutex_);
    refused_.emplace_back(std::move(request), why);
  }
  std::vector<ModelStatus> Models() const override { return {model_}; }
  absl::StatusOr<ModelStatus> Model(const std::string& name) const override {
    if (name == model_.name) return model_;
    return absl::NotFoundError(
        absl::StrCat("no model '", name, "'; there is '", model_.name, "'"));
  }
  RouterHealth Health() const override {
    return {RouterState::kReady, model_.ready, ""};
  }

  // Every later Submit is refused.
  void Refuse(const absl::Status& refusal) {
    base::MutexLock lock(&mutex_);
    refusal_ = refusal;
  }
  void SetMaxN(uint32_t n) { model_.info->set_max_n(n); }
  void SetMaxModelLen(uint32_t tokens) {
    model_.info->set_max_model_len(tokens);
  }
  // What facades refused by themselves.
  std::vector<std::pair<CanonicalRequest, absl::Status>> refused() const {
    base::MutexLock lock(&mutex_);
    return refused_;
  }
  size_t num_requests() const {
    base::MutexLock lock(&mutex_);
    return requests_.size();
  }
  // Waits until request number `index` has come; null after a long time.
  std::shared_ptr<Request> WaitFor(size_t index) {
    base::MutexLock lock(&mutex_);
    while (requests_.size() <= index) {
      if (arrived_.WaitWithTimeout(&mutex_, absl::Seconds(20))) return nullptr;
    }
    return requests_[index];
  }

 private:
  ModelStatus model_;
  mutable base::Mutex mutex_;
  base::CondVar arrived_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Request>> requests_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<CanonicalRequest, absl::Status>> refused_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
