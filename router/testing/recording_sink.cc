#include "router/testing/recording_sink.h"

#include "absl/time/clock.h"
#include "base/check.h"

namespace kvasir::router {

void RecordingSink::OnAccepted(uint32_t) {
  base::MutexLock lock(&mutex_);
  KVASIR_CHECK(accepted_ == 0 && ids_.empty() && done_ == 0);
  ++accepted_;
}

void RecordingSink::OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) {
  base::MutexLock lock(&mutex_);
  KVASIR_CHECK(done_ == 0);
  std::vector<int32_t>& ids = ids_[tokens.index()];
  ids.insert(ids.end(), tokens.token_ids().begin(), tokens.token_ids().end());
  changed_.SignalAll();
}

void RecordingSink::OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) {
  base::MutexLock lock(&mutex_);
  KVASIR_CHECK(done_ == 0);
  finishes_.push_back(finish);
}

void RecordingSink::OnDone(const absl::Status& status) {
  base::MutexLock lock(&mutex_);
  KVASIR_CHECK(done_ == 0);
  ++done_;
  status_ = status;
  changed_.SignalAll();
}

absl::Status RecordingSink::Wait() {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  base::MutexLock lock(&mutex_);
  while (done_ == 0) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return absl::UnknownError("no OnDone");
    changed_.WaitWithTimeout(&mutex_, left);
  }
  return status_;
}

bool RecordingSink::done() const {
  base::MutexLock lock(&mutex_);
  return done_ > 0;
}

int RecordingSink::accepted() const {
  base::MutexLock lock(&mutex_);
  return accepted_;
}

std::vector<int32_t> RecordingSink::ids(uint32_t index) const {
  base::MutexLock lock(&mutex_);
  const auto found = ids_.find(index);
  return found == ids_.end() ? std::vector<int32_t>() : found->second;
}

std::vector<kvasir::v1::GenerateEvent::Finish> RecordingSink::finishes() const {
  base::MutexLock lock(&mutex_);
  return finishes_;
}

}  // namespace kvasir::router
