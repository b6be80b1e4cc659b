// A RequestSink for tests: it records its calls, and the test can wait for
// the end.
#pragma once

#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// A sink that records its calls, and checks that their order is the one that
// RequestSink describes.
// Threads: its methods may be called from any thread.
class RecordingSink final : public RequestSink {
 public:
  void OnAccepted(uint32_t) override;
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) override;
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) override;
  void OnDone(const absl::Status& status) override;

  // Waits for OnDone and returns its status; UNKNOWN if it does not come within
  // 20 s.
  absl::Status Wait();
  bool done() const;
  int accepted() const;
  std::vector<int32_t> ids(uint32_t index = 0) const;
  std::vector<kvasir::v1::GenerateEvent::Finish> finishes() const;

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
