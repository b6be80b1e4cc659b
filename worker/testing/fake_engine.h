// A scripted engine for tests, without model and cache. Every step gives each
// running request a token (or TokensPerStep tokens), whose id is 1000 + its
// position in the output.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/engine/served_engine.h"

namespace kvasir::worker {

// Owns: the stepping thread, which calls sinks without holding a lock.
// Threads: any thread may call any method.
class FakeEngine final : public ServedEngine {
 public:
  explicit FakeEngine(absl::Duration step = absl::Milliseconds(1));
  ~FakeEngine() override;

  // From now on, refuses every request with `refusal`.
  void RefuseWith(Refusal refusal);
  // While `held` is true, requests get no tokens. Aborts and deadlines still
  // work.
  void Hold(bool held);
  void TokensPerStep(uint32_t count);
  // The number of requests that still run, the number of requests submitted so
  // far, and the request submitted last.
  size_t live() const;
  uint64_t submitted() const;
  std::optional<Request> LastRequest() const;
  bool draining() const;

  Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) override;
  int Abort(std::string_view id, std::optional<uint32_t> attempt) override;
  // Fails all running requests and every later request.
  void RefuseAll(const Refusal& why) override;
  void BeginDrain() override;
  bool WaitIdle(absl::Time deadline) override;
  void SubscribeLoad(std::weak_ptr<LoadListener> listener) override;
  EngineTotals Totals() const override;

  static constexpr uint64_t kTotalPages = 1000;

 private:
  using Key = std::pair<std::string, uint32_t>;
  struct Running {
    Request request;
    std::shared_ptr<EngineSink> sink;
    uint32_t produced = 0;
    bool accepted = false;
    bool aborted = false;
  };
  // A step's events for a sink, to be reported after the lock is released.
  struct Outcome {
    std::shared_ptr<EngineSink> sink;
    std::optional<uint32_t> accepted;
    std::vector<int32_t> tokens;
    std::optional<kvasir::v1::GenerateEvent::Finish> finish;
    std::optional<Refusal> failed;
  };

  LoadSnapshot Snapshot() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Outcome StepOne(Running* running) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Outcome> Step() ABSL_LOCKS_EXCLUDED(mutex_);
  static void Report(const Outcome& outcome);
  void Run();

  const absl::Duration step_;
  mutable base::Mutex mutex_;
  Refusal refusal_ ABSL_GUARDED_BY(mutex_);
  std::optional<Refusal> failure_ ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  uint32_t tokens_per_step_ ABSL_GUARDED_BY(mutex_) = 1;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t submitted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Request> last_request_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, Running> live_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<LoadListener>> listeners_ ABSL_GUARDED_BY(mutex_);
  EngineTotals totals_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kvasir::worker
