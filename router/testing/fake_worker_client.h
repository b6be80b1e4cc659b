// A worker for tests of everything above WorkerClient: no gRPC, scripted by the
// test, callbacks on the given timer thread as if it were the transport's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "router/core/timer_thread.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

// One attempt as the worker sees it.
// Threads: any thread; events reach the sink in the order of the calls.
class FakeAttempt final : public Attempt,
                          public std::enable_shared_from_this<FakeAttempt> {
 public:
  FakeAttempt(WorkerCall call, std::shared_ptr<AttemptSink> sink,
              TimerThread* transport)
      : call_(std::move(call)), sink_(std::move(sink)), transport_(transport) {}

  const WorkerCall& call() const { return call_; }
  bool started() const {
    base::MutexLock lock(&mutex_);
    return started_;
  }
  bool cancelled() const {
    base::MutexLock lock(&mutex_);
    return cancelled_;
  }

  void Accept() {
    kvasir::v1::GenerateEvent event;
    event.mutable_accepted()->set_prompt_tokens(
        static_cast<uint32_t>(call_.prompt.size_tokens()));
    Send(event);
  }
  void Tokens(const std::vector<int32_t>& ids, uint32_t index = 0) {
    kvasir::v1::GenerateEvent event;
    event.mutable_tokens()->set_index(index);
    event.mutable_tokens()->mutable_token_ids()->Add(ids.begin(), ids.end());
    Send(event);
  }
  void Finish(kvasir::v1::FinishReason reason, uint32_t index = 0) {
    kvasir::v1::GenerateEvent event;
    event.mutable_finish()->set_index(index);
    event.mutable_finish()->set_reason(reason);
    Send(event);
  }
  void Send(const kvasir::v1::GenerateEvent& event) {
    OnTransport([self = shared_from_this(), event] {
      if (!self->ended_) self->sink_->OnEvent(event);
    });
  }
  // Only the first counts.
  void End(const absl::Status& status) {
    OnTransport([self = shared_from_this(), status] {
      if (std::exchange(self->ended_, true)) return;
      const auto sink = std::move(self->sink_);
      sink->OnAttemptDone(status);
    });
  }

  void Start() override {
    bool cancelled;
    bool reachable;
    {
      base::MutexLock lock(&mutex_);
      started_ = true;
      cancelled = cancelled_;
      reachable = reachable_;
    }
    if (cancelled) End(absl::CancelledError("reset"));
    if (!reachable) End(absl::UnavailableError("no route"));
  }
  // Before Start.
  void MakeUnreachable() {
    base::MutexLock lock(&mutex_);
    reachable_ = false;
  }
  void Cancel() override {
    bool started;
    {
      base::MutexLock lock(&mutex_);
      cancelled_ = true;
      started = started_;
    }
    if (started) End(absl::CancelledError("reset"));
  }

 private:
  void OnTransport(TimerThread::Task task) {
    transport_->At(absl::InfinitePast(), std::move(task));
  }

  const WorkerCall call_;
  // The transport's thread only.
  std::shared_ptr<AttemptSink> sink_;
  bool ended_ = false;
  TimerThread* const transport_;
  mutable base::Mutex mutex_;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool reachable_ ABSL_GUARDED_BY(mutex_) = true;
};

// What a test holds to drive one worker; outlives its clients.
// Threads: any thread.
class FakeWorker {
 public:
  explicit FakeWorker(TimerThread* transport) : transport_(transport) {
    info_.set_api_version("kvasir.v1");
    info_.set_weights_id("w1");
    info_.set_tokenizer_hash("t1");
    info_.set_model_name("tiny");
    info_.set_max_model_len(100);
    info_.set_max_num_seqs(8);
    info_.set_page_tokens(16);
    report_.set_free_pages(100);
    report_.set_total_pages(100);
  }

  // The script, before it is asked.
  kvasir::v1::WorkerInfo* info() { return &info_; }
  void SetReachable(bool reachable) {
    base::MutexLock lock(&mutex_);
    reachable_ = reachable;
  }
  // Called with each new attempt, inside NewAttempt.
  void OnAttempt(
      std::function<void(const std::shared_ptr<FakeAttempt>&)> then) {
    base::MutexLock lock(&mutex_);
    on_attempt_ = std::move(then);
  }

  void Report(const kvasir::v1::LoadReport& report) {
    std::shared_ptr<LoadSink> watch;
    {
      base::MutexLock lock(&mutex_);
      report_ = report;
      watch = watch_;
    }
    if (watch != nullptr)
      OnTransport([watch, report] { watch->OnReport(report); });
  }
  // The connection breaks: the watch and all attempts.
  void Die() {
    SetReachable(false);
    EndWatch(absl::UnavailableError("connection lost"));
    for (const auto& attempt : attempts()) {
      attempt->End(absl::UnavailableError("connection lost"));
    }
  }

  std::vector<std::shared_ptr<FakeAttempt>> attempts() const {
    base::MutexLock lock(&mutex_);
    return attempts_;
  }
  bool watched() const {
    base::MutexLock lock(&mutex_);
    return watch_ != nullptr;
  }

  std::unique_ptr<WorkerClient> NewClient();

 private:
  friend class FakeWorkerClient;

  void OnTransport(TimerThread::Task task) {
    transport_->At(absl::InfinitePast(), std::move(task));
  }
  void EndWatch(const absl::Status& status) {
    std::shared_ptr<LoadSink> watch;
    {
      base::MutexLock lock(&mutex_);
      watch.swap(watch_);
    }
    if (watch != nullptr) {
      OnTransport([watch, status] { watch->OnWatchEnded(status); });
    }
  }

  TimerThread* const transport_;
  kvasir::v1::WorkerInfo info_;
  mutable base::Mutex mutex_;
  bool reachable_ ABSL_GUARDED_BY(mutex_) = true;
  kvasir::v1::LoadReport report_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const std::shared_ptr<FakeAttempt>&)> on_attempt_
      ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<FakeAttempt>> attempts_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<LoadSink> watch_ ABSL_GUARDED_BY(mutex_);
};

class FakeWorkerClient final : public WorkerClient {
 public:
  explicit FakeWorkerClient(FakeWorker* worker) : worker_(worker) {}

  std::shared_ptr<Attempt> NewAttempt(
      WorkerCall call, std::shared_ptr<AttemptSink> sink) override {
    auto attempt = std::make_shared<FakeAttempt>(
        std::move(call), std::move(sink), worker_->transport_);
    std::function<void(const std::shared_ptr<FakeAttempt>&)> then;
    bool reachable;
    {
      base::MutexLock lock(&worker_->mutex_);
      worker_->attempts_.push_back(attempt);
      then = worker_->on_attempt_;
      reachable = worker_->reachable_;
    }
    if (!reachable) attempt->MakeUnreachable();
    if (then) then(attempt);
    return attempt;
  }
  void GetInfo(absl::Duration,
               std::function<void(absl::StatusOr<kvasir::v1::WorkerInfo>)> done)
      override {
    absl::StatusOr<kvasir::v1::WorkerInfo> info = worker_->info_;
    {
      base::MutexLock lock(&worker_->mutex_);
      if (!worker_->reachable_ || closed_) {
        info = absl::UnavailableError("no route");
      }
    }
    worker_->OnTransport(
        [done, info = std::move(info)]() mutable { done(std::move(info)); });
  }
  void WatchLoad(absl::Duration, std::shared_ptr<LoadSink> sink) override {
    kvasir::v1::LoadReport report;
    bool alive;
    {
      base::MutexLock lock(&worker_->mutex_);
      alive = worker_->reachable_ && !closed_;
      if (alive) worker_->watch_ = sink;
      report = worker_->report_;
    }
    worker_->OnTransport([sink, report, alive] {
      if (alive) {
        sink->OnReport(report);
      } else {
        sink->OnWatchEnded(absl::UnavailableError("no route"));
      }
    });
  }
  void Close() override {
    {
      base::MutexLock lock(&worker_->mutex_);
      closed_ = true;
    }
    worker_->EndWatch(absl::CancelledError("closed"));
    for (const auto& attempt : worker_->attempts()) attempt->Cancel();
  }

 private:
  FakeWorker* const worker_;
  bool closed_ = false;  // guarded by worker_->mutex_
};

inline std::unique_ptr<WorkerClient> FakeWorker::NewClient() {
  return std::make_unique<FakeWorkerClient>(this);
}

}  // namespace kvasir::router
