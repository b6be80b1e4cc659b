// A scripted engine for tests: no model, no cache. Every step it gives each
// running request one token: 1000 + its position in the output.
#pragma once

#include <algorithm>
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
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "worker/engine/served_engine.h"

namespace kvasir::worker {

// Owns: the stepping thread. Sinks are called on it, without a lock.
// Threads: any thread.
class FakeEngine final : public ServedEngine {
 public:
  explicit FakeEngine(absl::Duration step = absl::Milliseconds(1))
      : step_(step), thread_([this] { Run(); }) {}
  ~FakeEngine() override {
    {
      base::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  // The script.
  void RefuseWith(Refusal refusal) {
    base::MutexLock lock(&mutex_);
    refusal_ = std::move(refusal);
  }
  // Nothing advances while held; aborts and deadlines still count.
  void Hold(bool held) {
    base::MutexLock lock(&mutex_);
    held_ = held;
  }
  void TokensPerStep(uint32_t count) {
    base::MutexLock lock(&mutex_);
    tokens_per_step_ = count;
  }
  // What happened.
  size_t live() const {
    base::MutexLock lock(&mutex_);
    return live_.size();
  }
  uint64_t submitted() const {
    base::MutexLock lock(&mutex_);
    return submitted_;
  }
  std::optional<Request> LastRequest() const {
    base::MutexLock lock(&mutex_);
    return last_request_;
  }
  bool draining() const {
    base::MutexLock lock(&mutex_);
    return draining_;
  }

  Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) override {
    base::MutexLock lock(&mutex_);
    if (!refusal_.ok()) return refusal_;
    if (draining_) {
      return {absl::UnavailableError("draining"), RefusalReason::kDraining};
    }
    const Key key(request.request_id, request.attempt);
    if (live_.count(key) != 0) {
      return {absl::AlreadyExistsError(request.request_id),
              RefusalReason::kNone};
    }
    ++submitted_;
    last_request_ = request;
    live_[key] = {std::move(request), std::move(sink), 0, false, false};
    return {};
  }

  int Abort(std::string_view id, std::optional<uint32_t> attempt) override {
    base::MutexLock lock(&mutex_);
    int matched = 0;
    for (auto& [key, running] : live_) {
      if (key.first != id) continue;
      if (attempt.has_value() && key.second != *attempt) continue;
      running.aborted = true;
      ++matched;
    }
    return matched;
  }

  // What comes later fails, too.
  void RefuseAll(const Refusal& why) override {
    base::MutexLock lock(&mutex_);
    failure_ = why;
  }

  void BeginDrain() override {
    base::MutexLock lock(&mutex_);
    draining_ = true;
  }

  bool WaitIdle(absl::Time deadline) override {
    while (true) {
      {
        base::MutexLock lock(&mutex_);
        if (live_.empty()) return true;
      }
      if (absl::Now() >= deadline) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  void SubscribeLoad(std::weak_ptr<LoadListener> listener) override {
    LoadSnapshot load;
    {
      base::MutexLock lock(&mutex_);
      listeners_.push_back(listener);
      load = Snapshot();
    }
    if (const auto strong = listener.lock()) strong->OnLoad(load);
  }

  EngineTotals Totals() const override {
    base::MutexLock lock(&mutex_);
    return totals_;
  }

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
  // What to tell a sink once the lock is gone.
  struct Told {
    std::shared_ptr<EngineSink> sink;
    std::optional<uint32_t> accepted;
    std::vector<int32_t> tokens;
    std::optional<FinishInfo> finish;
    std::optional<Refusal> failed;
  };

  LoadSnapshot Snapshot() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    LoadSnapshot load;
    load.step = steps_;
    load.running = static_cast<uint32_t>(live_.size());
    load.total_pages = kTotalPages;
    load.free_pages = kTotalPages - live_.size();
    load.draining = draining_;
    return load;
  }

  Told StepOne(Running* running) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Told told;
    told.sink = running->sink;
    const Request& request = running->request;
    const auto prompt = static_cast<uint32_t>(request.prompt.size_tokens());
    if (!running->accepted) told.accepted = prompt;
    running->accepted = true;
    if (failure_.has_value()) {
      told.failed = *failure_;
    } else if (request.deadline <= absl::Now()) {
      told.failed = Refusal{absl::DeadlineExceededError("past its deadline"),
                            RefusalReason::kNone};
    } else if (!running->aborted && !held_) {
      const uint32_t left = request.sampling.max_tokens() - running->produced;
      for (uint32_t i = 0; i < std::min(left, tokens_per_step_); ++i) {
        told.tokens.push_back(1000 + static_cast<int32_t>(running->produced++));
      }
    }
    const bool complete = running->produced >= request.sampling.max_tokens();
    if (!told.failed.has_value() && (running->aborted || complete)) {
      FinishInfo info;
      info.reason =
          running->aborted ? FinishReason::kAbort : FinishReason::kLength;
      info.prompt_tokens = prompt;
      info.output_tokens = running->produced;
      info.last = true;
      told.finish = info;
    }
    return told;
  }

  std::vector<Told> Step() ABSL_LOCKS_EXCLUDED(mutex_) {
    base::MutexLock lock(&mutex_);
    std::vector<Told> all;
    ++steps_;
    for (auto entry = live_.begin(); entry != live_.end();) {
      Told told = StepOne(&entry->second);
      const bool over = told.finish.has_value() || told.failed.has_value();
      if (told.finish.has_value()) {
        const bool aborted = told.finish->reason == FinishReason::kAbort;
        ++(aborted ? totals_.aborted : totals_.finished);
      } else if (over) {
        ++totals_.aborted;
      }
      entry = over ? live_.erase(entry) : std::next(entry);
      all.push_back(std::move(told));
    }
    return all;
  }

  static void Tell(const Told& told) {
    if (told.accepted.has_value()) told.sink->OnAccepted(*told.accepted);
    if (!told.tokens.empty()) told.sink->OnTokens({0, told.tokens, {}, {}});
    if (told.finish.has_value()) told.sink->OnFinished(*told.finish);
    if (told.failed.has_value()) told.sink->OnFailed(*told.failed);
  }

  void Run() {
    while (true) {
      for (const Told& told : Step()) Tell(told);
      LoadSnapshot load;
      std::vector<std::weak_ptr<LoadListener>> listeners;
      {
        base::MutexLock lock(&mutex_);
        if (stopping_) return;
        load = Snapshot();
        listeners = listeners_;
      }
      for (const auto& weak : listeners) {
        if (const auto listener = weak.lock()) listener->OnLoad(load);
      }
      absl::SleepFor(step_);
    }
  }

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
