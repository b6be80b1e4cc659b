#include "worker/testing/fake_engine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"

namespace kvasir::worker {

FakeEngine::FakeEngine(absl::Duration step)
    : step_(step), thread_([this] { Run(); }) {}

FakeEngine::~FakeEngine() {
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void FakeEngine::RefuseWith(Refusal refusal) {
  base::MutexLock lock(&mutex_);
  refusal_ = std::move(refusal);
}

void FakeEngine::Hold(bool held) {
  base::MutexLock lock(&mutex_);
  held_ = held;
}

void FakeEngine::TokensPerStep(uint32_t count) {
  base::MutexLock lock(&mutex_);
  tokens_per_step_ = count;
}

size_t FakeEngine::live() const {
  base::MutexLock lock(&mutex_);
  return live_.size();
}

uint64_t FakeEngine::submitted() const {
  base::MutexLock lock(&mutex_);
  return submitted_;
}

std::optional<Request> FakeEngine::LastRequest() const {
  base::MutexLock lock(&mutex_);
  return last_request_;
}

bool FakeEngine::draining() const {
  base::MutexLock lock(&mutex_);
  return draining_;
}

Refusal FakeEngine::Submit(Request request, std::shared_ptr<EngineSink> sink) {
  base::MutexLock lock(&mutex_);
  if (!refusal_.ok()) return refusal_;
  if (draining_) {
    return {absl::UnavailableError("the worker is draining"),
            kvasir::v1::Refusal::DRAINING};
  }
  const Key key(request.request_id, request.attempt);
  if (live_.count(key) != 0) {
    return {absl::AlreadyExistsError("request " + request.request_id +
                                     " runs already"),
            kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
  }
  ++submitted_;
  last_request_ = request;
  const auto before = static_cast<uint32_t>(request.emitted.size_tokens());
  live_[key] = {std::move(request), std::move(sink), before, false, false};
  return {};
}

int FakeEngine::Abort(std::string_view id, std::optional<uint32_t> attempt) {
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

void FakeEngine::RefuseAll(const Refusal& why) {
  base::MutexLock lock(&mutex_);
  failure_ = why;
}

void FakeEngine::BeginDrain() {
  base::MutexLock lock(&mutex_);
  draining_ = true;
}

bool FakeEngine::WaitIdle(absl::Time deadline) {
  while (true) {
    {
      base::MutexLock lock(&mutex_);
      if (live_.empty()) return true;
    }
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
}

void FakeEngine::SubscribeLoad(std::weak_ptr<LoadListener> listener) {
  LoadSnapshot load;
  {
    base::MutexLock lock(&mutex_);
    listeners_.push_back(listener);
    load = Snapshot();
  }
  if (const auto strong = listener.lock()) strong->OnLoad(load);
}

EngineTotals FakeEngine::Totals() const {
  base::MutexLock lock(&mutex_);
  return totals_;
}

LoadSnapshot FakeEngine::Snapshot() const {
  LoadSnapshot load;
  load.step = steps_;
  load.running = static_cast<uint32_t>(live_.size());
  load.total_pages = kTotalPages;
  load.free_pages = kTotalPages - live_.size();
  load.draining = draining_;
  return load;
}

FakeEngine::Outcome FakeEngine::StepOne(Running* running) {
  Outcome outcome;
  outcome.sink = running->sink;
  const Request& request = running->request;
  const auto prompt = static_cast<uint32_t>(request.prompt.size_tokens());
  if (!running->accepted) outcome.accepted = prompt;
  running->accepted = true;
  if (failure_.has_value()) {
    outcome.failed = *failure_;
  } else if (request.deadline <= absl::Now()) {
    outcome.failed =
        Refusal{absl::DeadlineExceededError("the request is past its deadline"),
                kvasir::v1::Refusal::REFUSAL_UNSPECIFIED};
  } else if (!running->aborted && !held_) {
    const uint32_t left = request.sampling.max_tokens() - running->produced;
    for (uint32_t i = 0; i < std::min(left, tokens_per_step_); ++i) {
      outcome.tokens.push_back(1000 +
                               static_cast<int32_t>(running->produced++));
    }
  }
  const bool complete = running->produced >= request.sampling.max_tokens();
  if (!outcome.failed.has_value() && (running->aborted || complete)) {
    outcome.finish.emplace();
    outcome.finish->set_reason(running->aborted ? kvasir::v1::FINISH_ABORT
                                                : kvasir::v1::FINISH_LENGTH);
    outcome.finish->set_prompt_tokens(prompt);
    outcome.finish->set_output_tokens(running->produced);
  }
  return outcome;
}

std::vector<FakeEngine::Outcome> FakeEngine::Step() {
  base::MutexLock lock(&mutex_);
  std::vector<Outcome> all;
  ++steps_;
  for (auto entry = live_.begin(); entry != live_.end();) {
    Outcome outcome = StepOne(&entry->second);
    const bool over = outcome.finish.has_value() || outcome.failed.has_value();
    if (outcome.finish.has_value()) {
      const bool aborted = outcome.finish->reason() == kvasir::v1::FINISH_ABORT;
      ++(aborted ? totals_.aborted : totals_.finished);
    } else if (over) {
      ++totals_.aborted;
    }
    entry = over ? live_.erase(entry) : std::next(entry);
    all.push_back(std::move(outcome));
  }
  return all;
}

void FakeEngine::Report(const Outcome& outcome) {
  if (outcome.accepted.has_value()) outcome.sink->OnAccepted(*outcome.accepted);
  if (!outcome.tokens.empty()) {
    kvasir::v1::GenerateEvent::Tokens tokens;
    tokens.mutable_token_ids()->Add(outcome.tokens.begin(),
                                    outcome.tokens.end());
    outcome.sink->OnTokens(tokens);
  }
  if (outcome.finish.has_value())
    outcome.sink->OnFinished(*outcome.finish, true);
  if (outcome.failed.has_value()) outcome.sink->OnFailed(*outcome.failed);
}

void FakeEngine::Run() {
  while (true) {
    for (const Outcome& outcome : Step()) Report(outcome);
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

}  // namespace kvasir::worker
