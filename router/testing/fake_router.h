// A RequestRouter for tests: it records submitted requests, and the test
// decides which events their sinks receive.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// A router without workers.
// Threads: its methods may be called from any thread. Sinks are called on the
// thread that calls Emit, Finish, Done or Complete.
class FakeRouter final : public RequestRouter {
 public:
  class Request final : public RequestHandle {
   public:
    Request(std::string id, CanonicalRequest request,
            std::shared_ptr<RequestSink> sink);

    const std::string& id() const override { return id_; }
    void Cancel(CancelReason reason) override;

    const CanonicalRequest& request() const { return request_; }
    bool cancelled() const;
    CancelReason reason() const;

    // Delivers tokens to the sink. Each byte of `text` is a token id.
    void Emit(const std::string& text, uint32_t index = 0);
    void Finish(kvasir::v1::FinishReason reason = kvasir::v1::FINISH_LENGTH,
                uint32_t index = 0);
    void Done(const absl::Status& status = absl::OkStatus());
    // Delivers a whole answer: Emit, Finish and Done.
    void Complete(const std::string& text);

   private:
    const std::string id_;
    const CanonicalRequest request_;
    std::shared_ptr<RequestSink> sink_;
    mutable base::Mutex mutex_;
    bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
    CancelReason reason_ ABSL_GUARDED_BY(mutex_) = CancelReason::kClient;
  };

  FakeRouter();

  absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) override;
  void LogRefused(CanonicalRequest request, const absl::Status& why) override;
  std::vector<ModelStatus> Models() const override { return {model_}; }
  absl::StatusOr<ModelStatus> Model(const std::string& name) const override;
  RouterHealth Health() const override;

  // Makes every later Submit return `refusal`.
  void Refuse(const absl::Status& refusal);
  void SetMaxN(uint32_t n) { model_.info->set_max_n(n); }
  void SetMaxModelLen(uint32_t tokens);
  // The requests that a facade has refused and reported by LogRefused, with
  // their errors.
  std::vector<std::pair<CanonicalRequest, absl::Status>> refused() const;
  size_t num_requests() const;
  // Waits until the request with this index has been submitted. Returns null if
  // that takes too long.
  std::shared_ptr<Request> WaitFor(size_t index);

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
