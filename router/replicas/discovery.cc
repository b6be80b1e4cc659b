#include "router/replicas/discovery.h"

#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/log.h"

namespace kvasir::router {

struct Discovery::Source {
  explicit Source(std::shared_ptr<WorkerSource> looks)
      : source(std::move(looks)), membership(source->rules()) {}

  // Shared with the thread of a lookup, which may outlive the Discovery.
  const std::shared_ptr<WorkerSource> source;
  Membership membership;
  bool looked_up = false;
  std::string problem;
};

Discovery::Discovery(WorkerList list, Options options, TimerThread* timers)
    : options_(std::move(options)),
      timers_(timers),
      fixed_(std::move(list.fixed)) {
  for (auto& source : list.sources) {
    sources_.push_back(std::make_unique<Source>(std::move(source)));
  }
}

Discovery::~Discovery() { gate_->Close(); }

void Discovery::Start(absl::Duration patience) {
  for (const auto& source : sources_) {
    timers_->At(absl::InfinitePast(), [this, gate = gate_, at = source.get()] {
      if (!gate->Enter()) return;
      Look(at);
      gate->Leave();
    });
  }
  const absl::Time deadline = base::Clock::Real().Now() + patience;
  base::MutexLock lock(&mutex_);
  while (num_looked_up_ < sources_.size()) {
    const absl::Time now = base::Clock::Real().Now();
    if (now >= deadline) return;
    changed_.WaitWithTimeout(&mutex_, deadline - now);
  }
}

void Discovery::Look(Source* source) {
  const auto look = [this, gate = gate_, source, looks = source->source] {
    Answer answer = looks->Look();
    // The timers may be gone, unless the gate is open.
    if (!gate->Enter()) return;
    timers_->At(absl::InfinitePast(),
                [this, gate, source, answer = std::move(answer)] {
                  if (!gate->Enter()) return;
                  OnAnswer(source, answer);
                  gate->Leave();
                });
    gate->Leave();
  };
  try {
    std::thread(look).detach();
  } catch (const std::system_error& error) {  // no more threads are allowed
    OnAnswer(source, absl::ResourceExhaustedError(error.what()));
  }
}

void Discovery::OnAnswer(Source* source, const Answer& answer) {
  std::string problem;
  if (!answer.ok()) {
    problem =
        absl::StrCat(source->source->name(), ": ", answer.status().message());
  } else {
    source->membership.OnAnswer(*answer, options_.alive);
    if (answer->empty()) {
      problem = absl::StrCat(source->source->name(), " has no workers");
    }
  }
  if (problem != source->problem) {
    if (problem.empty()) {
      base::LogInfo("workers found again",
                    {{"source", source->source->name()}});
    } else {
      base::LogWarning("workers cannot be found", {{"why", problem}});
    }
  }
  source->problem = std::move(problem);
  Apply();
  timers_->At(base::Clock::Real().Now() + options_.refresh,
              [this, gate = gate_, source] {
                if (!gate->Enter()) return;
                Look(source);
                gate->Leave();
              });
  if (std::exchange(source->looked_up, true)) return;
  base::MutexLock lock(&mutex_);
  ++num_looked_up_;
  changed_.SignalAll();
}

void Discovery::Apply() const {
  std::vector<WorkerAddress> all = fixed_;
  std::vector<std::string> problems;
  for (const auto& source : sources_) {
    const std::vector<WorkerAddress> found = source->membership.workers();
    all.insert(all.end(), found.begin(), found.end());
    if (!source->problem.empty()) problems.push_back(source->problem);
  }
  options_.apply(all, absl::StrJoin(problems, "; "));
}

}  // namespace kvasir::router
