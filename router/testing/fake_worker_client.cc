#include "router/testing/fake_worker_client.h"

#include <utility>

#include "base/clock.h"
#include "proto/load_heartbeat.h"

namespace kvasir::router {

FakeAttempt::FakeAttempt(WorkerCall call, std::shared_ptr<AttemptSink> sink,
                         TimerThread* transport)
    : call_(std::move(call)), sink_(std::move(sink)), transport_(transport) {}

bool FakeAttempt::started() const {
  base::MutexLock lock(&mutex_);
  return started_;
}

bool FakeAttempt::cancelled() const {
  base::MutexLock lock(&mutex_);
  return cancelled_;
}

void FakeAttempt::Accept() {
  kvasir::v1::GenerateEvent event;
  event.mutable_accepted()->set_prompt_tokens(
      static_cast<uint32_t>(call_.prompt.size_tokens()));
  Send(event);
}

void FakeAttempt::Tokens(const std::vector<int32_t>& ids, uint32_t index) {
  kvasir::v1::GenerateEvent event;
  event.mutable_tokens()->set_index(index);
  event.mutable_tokens()->mutable_token_ids()->Add(ids.begin(), ids.end());
  Send(event);
}

void FakeAttempt::Finish(kvasir::v1::FinishReason reason, uint32_t index) {
  kvasir::v1::GenerateEvent event;
  event.mutable_finish()->set_index(index);
  event.mutable_finish()->set_reason(reason);
  Send(event);
}

void FakeAttempt::Send(const kvasir::v1::GenerateEvent& event) {
  OnTransport([self = shared_from_this(), event] {
    if (!self->ended_) self->sink_->OnEvent(event);
  });
}

void FakeAttempt::End(const absl::Status& status) {
  OnTransport([self = shared_from_this(), status] {
    if (std::exchange(self->ended_, true)) return;
    const auto sink = std::move(self->sink_);
    sink->OnAttemptDone(status);
  });
}

void FakeAttempt::Start() {
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

void FakeAttempt::MakeUnreachable() {
  base::MutexLock lock(&mutex_);
  reachable_ = false;
}

void FakeAttempt::Cancel() {
  bool started;
  {
    base::MutexLock lock(&mutex_);
    cancelled_ = true;
    started = started_;
  }
  if (started) End(absl::CancelledError("reset"));
}

void FakeAttempt::OnTransport(TimerThread::Task task) {
  transport_->At(absl::InfinitePast(), std::move(task));
}

FakeWorker::FakeWorker(TimerThread* transport) : transport_(transport) {
  info_.set_api_version("kvasir.v1");
  info_.set_weights_id("w1");
  info_.set_tokenizer_hash("t1");
  info_.set_model_name("tiny");
  info_.set_max_model_len(100);
  info_.set_max_num_seqs(8);
  info_.set_page_tokens(16);
  report_.set_free_pages(100);
  report_.set_total_pages(100);
  Beat();
}

void FakeWorker::Beat() {
  transport_->At(
      base::Clock::Real().Now() + proto::kLoadHeartbeat, [this, gate = gate_] {
        if (!gate->Enter()) return;
        std::map<const FakeWorkerClient*, std::shared_ptr<LoadSink>> watches;
        kvasir::v1::LoadReport report;
        {
          base::MutexLock lock(&mutex_);
          if (!silent_) watches = watches_;
          report = report_;
        }
        for (const auto& [client, watch] : watches) {
          watch->OnReport(report);
        }
        Beat();
        gate->Leave();
      });
}

void FakeWorker::SetSilent(bool silent) {
  base::MutexLock lock(&mutex_);
  silent_ = silent;
}

void FakeWorker::SetReachable(bool reachable) {
  base::MutexLock lock(&mutex_);
  reachable_ = reachable;
}

void FakeWorker::OnInfoAsked(std::function<void()> then) {
  base::MutexLock lock(&mutex_);
  on_info_asked_ = std::move(then);
}

void FakeWorker::OnAttempt(
    std::function<void(const std::shared_ptr<FakeAttempt>&)> then) {
  base::MutexLock lock(&mutex_);
  on_attempt_ = std::move(then);
}

void FakeWorker::Report(const kvasir::v1::LoadReport& report) {
  std::map<const FakeWorkerClient*, std::shared_ptr<LoadSink>> watches;
  {
    base::MutexLock lock(&mutex_);
    report_ = report;
    watches = watches_;
  }
  for (const auto& [client, watch] : watches) {
    OnTransport([watch = watch, report] { watch->OnReport(report); });
  }
}

void FakeWorker::Die() {
  SetReachable(false);
  std::map<const FakeWorkerClient*, std::shared_ptr<LoadSink>> watches;
  {
    base::MutexLock lock(&mutex_);
    watches.swap(watches_);
  }
  for (const auto& [client, watch] : watches) {
    OnTransport([watch = watch] {
      watch->OnWatchEnded(absl::UnavailableError("connection lost"));
    });
  }
  for (const auto& attempt : attempts()) {
    attempt->End(absl::UnavailableError("connection lost"));
  }
}

std::vector<std::shared_ptr<FakeAttempt>> FakeWorker::attempts() const {
  base::MutexLock lock(&mutex_);
  return attempts_;
}

bool FakeWorker::watched() const {
  base::MutexLock lock(&mutex_);
  return !watches_.empty();
}

void FakeWorker::OnTransport(TimerThread::Task task) {
  transport_->At(absl::InfinitePast(), std::move(task));
}

void FakeWorker::EndWatch(const FakeWorkerClient* client) {
  std::shared_ptr<LoadSink> watch;
  {
    base::MutexLock lock(&mutex_);
    const auto found = watches_.find(client);
    if (found == watches_.end()) return;
    watch = std::move(found->second);
    watches_.erase(found);
  }
  OnTransport([watch] { watch->OnWatchEnded(absl::CancelledError("closed")); });
}

std::shared_ptr<Attempt> FakeWorkerClient::NewAttempt(
    WorkerCall call, std::shared_ptr<AttemptSink> sink) {
  auto attempt = std::make_shared<FakeAttempt>(std::move(call), std::move(sink),
                                               worker_->transport_);
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

void FakeWorkerClient::GetInfo(
    absl::Duration,
    std::function<void(absl::StatusOr<kvasir::v1::WorkerInfo>)> done) {
  absl::StatusOr<kvasir::v1::WorkerInfo> info = worker_->info_;
  std::function<void()> asked;
  {
    base::MutexLock lock(&worker_->mutex_);
    asked = worker_->on_info_asked_;
    if (!worker_->reachable_ || closed_) {
      info = absl::UnavailableError("no route");
    }
  }
  if (asked) asked();
  worker_->OnTransport(
      [done, info = std::move(info)]() mutable { done(std::move(info)); });
}

void FakeWorkerClient::WatchLoad(absl::Duration,
                                 std::shared_ptr<LoadSink> sink) {
  kvasir::v1::LoadReport report;
  bool alive;
  {
    base::MutexLock lock(&worker_->mutex_);
    alive = worker_->reachable_ && !closed_;
    if (alive) worker_->watches_[this] = sink;
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

FakeWorkerClient::FakeWorkerClient(FakeWorker* worker)
    : worker_(worker), gate_(worker->gate_) {}

FakeWorkerClient::~FakeWorkerClient() {
  if (!gate_->Enter()) return;  // the worker is gone
  worker_->EndWatch(this);
  gate_->Leave();
}

void FakeWorkerClient::Close() {
  {
    base::MutexLock lock(&worker_->mutex_);
    closed_ = true;
  }
  worker_->EndWatch(this);
  for (const auto& attempt : worker_->attempts()) attempt->Cancel();
}

std::unique_ptr<WorkerClient> FakeWorker::NewClient() {
  return std::make_unique<FakeWorkerClient>(this);
}

}  // namespace kvasir::router
