#include "worker/service/load_publisher.h"

#include <algorithm>
#include <utility>

namespace kvasir::worker {
namespace {

// The shortest interval between two reports, even if a watcher asks for less.
constexpr absl::Duration kFloor = absl::Milliseconds(10);

}  // namespace

absl::Time LoadSchedule::NextDue(const LoadSnapshot& load) const {
  if (!last_.has_value() || last_->draining != load.draining) {
    return absl::InfinitePast();
  }
  return last_time_ + (UpToDate(load) ? heartbeat_ : min_interval_);
}

void LoadSchedule::Sent(absl::Time now, const LoadSnapshot& load) {
  last_ = load;
  last_time_ = now;
}

LoadPublisher::LoadPublisher(absl::Duration heartbeat)
    : heartbeat_(heartbeat), thread_([this] { Run(); }) {}

LoadPublisher::~LoadPublisher() { Stop(); }

void LoadPublisher::OnLoad(const LoadSnapshot& load) {
  base::MutexLock lock(&mutex_);
  const bool drain_flips = load_.draining != load.draining;
  load_ = load;
  if (!wake_on_change_ && !drain_flips) return;
  wake_on_change_ = false;
  wake_.Signal();
}

void LoadPublisher::Watch(std::weak_ptr<LoadWatcher> watcher,
                          absl::Duration min_interval) {
  std::shared_ptr<LoadWatcher> refused;
  {
    base::MutexLock lock(&mutex_);
    if (stopping_) {
      refused = watcher.lock();
    } else {
      const absl::Duration interval = std::max(min_interval, kFloor);
      entries_.push_back(
          {std::move(watcher),
           LoadSchedule(interval, std::max(interval, heartbeat_))});
      wake_.Signal();
    }
  }
  if (refused != nullptr) refused->OnClosed();
}

void LoadPublisher::Stop() {
  std::vector<Entry> closed;
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    closed.swap(entries_);
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
  for (const Entry& entry : closed) {
    if (const auto watcher = entry.watcher.lock()) watcher->OnClosed();
  }
}

std::vector<std::shared_ptr<LoadWatcher>> LoadPublisher::TakeDue(
    absl::Time* next) {
  std::erase_if(entries_,
                [](const Entry& entry) { return entry.watcher.expired(); });
  const absl::Time now = base::Clock::Real().Now();
  *next = absl::InfiniteFuture();
  std::vector<std::shared_ptr<LoadWatcher>> due;
  for (Entry& entry : entries_) {
    if (entry.schedule.NextDue(load_) <= now) {
      if (auto watcher = entry.watcher.lock()) {
        due.push_back(std::move(watcher));
        entry.schedule.Sent(now, load_);
      }
    }
    wake_on_change_ |= entry.schedule.UpToDate(load_);
    *next = std::min(*next, entry.schedule.NextDue(load_));
  }
  return due;
}

void LoadPublisher::Run() {
  while (true) {
    std::vector<std::shared_ptr<LoadWatcher>> due;
    LoadSnapshot load;
    {
      base::MutexLock lock(&mutex_);
      if (stopping_) return;
      absl::Time next;
      due = TakeDue(&next);
      load = load_;
      if (due.empty()) {
        if (next == absl::InfiniteFuture()) {
          wake_.Wait(&mutex_);
        } else {
          wake_.WaitWithTimeout(&mutex_, next - base::Clock::Real().Now());
        }
        continue;
      }
    }
    for (const auto& watcher : due) watcher->OnReport(load);
  }
}

}  // namespace kvasir::worker
