// A sink for tests: remembers what it was told and lets a test wait for it.
#pragma once

#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/mutex.h"
#include "router/canonical.h"

namespace kvasir::router {

// Threads: any thread. Checks the order that RequestSink promises.
class RecordingSink final : public RequestSink {
 public:
  void OnAccepted(uint32_t) override {
    base::MutexLock lock(&mutex_);
    KVASIR_CHECK(accepted_ == 0 && ids_.empty() && done_ == 0);
    ++accepted_;
  }
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) override {
    base::MutexLock lock(&mutex_);
    KVASIR_CHECK(done_ == 0);
    std::vector<int32_t>& ids = ids_[tokens.index()];
    ids.insert(ids.end(), tokens.token_ids().begin(), tokens.token_ids().end());
    changed_.SignalAll();
  }
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) override {
    base::MutexLock lock(&mutex_);
    KVASIR_CHECK(done_ == 0);
    finishes_.push_back(finish);
  }
  void OnDone(const absl::Status& status) override {
    base::MutexLock lock(&mutex_);
    KVASIR_CHECK(done_ == 0);
    ++done_;
    status_ = status;
    changed_.SignalAll();
  }

  // The final status; UNKNOWN if none comes within 20 s.
  absl::Status Wait() {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    base::MutexLock lock(&mutex_);
    while (done_ == 0) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return absl::UnknownError("no OnDone");
      changed_.WaitWithTimeout(&mutex_, left);
    }
    return status_;
  }
  bool done() const {
    base::MutexLock lock(&mutex_);
    return done_ > 0;
  }
  int accepted() const {
    base::MutexLock lock(&mutex_);
    return accepted_;
  }
  std::vector<int32_t> ids(uint32_t index = 0) const {
    base::MutexLock lock(&mutex_);
    const auto found = ids_.find(index);
    return found == ids_.end() ? std::vector<int32_t>() : found->second;
  }
  std::vector<kvasir::v1::GenerateEvent::Finish> finishes() const {
    base::MutexLock lock(&mutex_);
    return finishes_;
  }

 private:
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  int accepted_ ABSL_GUARDED_BY(mutex_) = 0;
  int done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::vector<int32_t>> ids_ ABSL_GUARDED_BY(mutex_);
  std::vector<kvasir::v1::GenerateEvent::Finish> finishes_
      ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
