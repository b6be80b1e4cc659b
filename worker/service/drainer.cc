#include "worker/service/drainer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "worker/engine/admission.h"

namespace kvasir::worker {
namespace {

// The interval at which WaitIdle reads deadline_ again, because a later Start
// may set an earlier deadline.
constexpr absl::Duration kSlice = absl::Milliseconds(50);
// How long to wait for requests to end after RefuseAll. They end within one
// step unless the engine hangs.
constexpr absl::Duration kEndGrace = absl::Seconds(10);

}  // namespace

void Drainer::Stop() {
  std::thread thread;
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

void Drainer::Start(absl::Time deadline, Done done) {
  kvasir::v1::DrainResponse response;
  {
    base::MutexLock lock(&mutex_);
    deadline_ = std::min(deadline_, deadline);
    if (!drained_ && !stopping_) {
      waiting_.push_back(std::move(done));
      if (waiting_.size() == 1 && !thread_.joinable()) {
        thread_ = std::thread([this] { Run(); });
      }
      return;
    }
    response = response_;
  }
  done(response);
}

bool Drainer::WaitIdle() {
  while (true) {
    absl::Time deadline;
    {
      base::MutexLock lock(&mutex_);
      deadline = stopping_ ? absl::InfinitePast() : deadline_;
    }
    const absl::Time now = base::Clock::Real().Now();
    if (engine_->WaitIdle(std::min(deadline, now + kSlice))) return true;
    if (deadline <= now) return false;
  }
}

void Drainer::Run() {
  before_();
  const EngineTotals start = engine_->Totals();
  engine_->BeginDrain();
  if (!WaitIdle()) {
    // Refuse the requests instead of aborting them: a router would take an
    // aborted request for a complete answer.
    engine_->RefuseAll(Admission::DrainEnded());
    engine_->WaitIdle(base::Clock::Real().Now() + kEndGrace);
  }
  const EngineTotals end = engine_->Totals();
  kvasir::v1::DrainResponse response;
  response.set_finished(static_cast<uint32_t>(end.finished - start.finished));
  response.set_aborted(static_cast<uint32_t>(end.aborted + end.failed -
                                             start.aborted - start.failed));
  Answer(response);
}

void Drainer::Answer(const kvasir::v1::DrainResponse& response) {
  std::vector<Done> waiting;
  {
    base::MutexLock lock(&mutex_);
    drained_ = true;
    response_ = response;
    waiting.swap(waiting_);
  }
  for (const Done& done : waiting) done(response);
}

}  // namespace kvasir::worker
