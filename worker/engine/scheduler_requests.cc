// The part of class Scheduler that handles the arrival and the end of requests.
#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/string_view.h"
#include "worker/engine/scheduler.h"

namespace kvasir::worker {
namespace {

using base::AbslView;

// A new sequence reserves memory for at most this many output tokens.
constexpr size_t kTokensReserve = 256;

// How long a sample spent in each phase until `now`.
struct Phases {
  absl::Duration queue;
  std::optional<absl::Duration> prefill;
  std::optional<absl::Duration> decode;
};

Phases PhasesOf(const RequestState& state, const Sequence& sample,
                absl::Time now) {
  const absl::Time started = std::min(state.first_step, now);
  const absl::Time first_token = std::min(sample.first_token, now);
  Phases phases;
  phases.queue = started - state.request.arrival;
  if (state.started) phases.prefill = first_token - started;
  if (sample.first_token != absl::InfiniteFuture()) {
    phases.decode = now - first_token;
  }
  return phases;
}

// Converts the length of a phase to microseconds. 0 if the sample did not reach
// the phase.
uint64_t Microseconds(std::optional<absl::Duration> phase) {
  return static_cast<uint64_t>(std::max<int64_t>(
      0, absl::ToInt64Microseconds(phase.value_or(absl::ZeroDuration()))));
}

void Summarize(const Phases& phases, RequestSummary* summary) {
  summary->queue = phases.queue;
  summary->prefill = phases.prefill;
  summary->decode = phases.decode;
}

}  // namespace

// ---------------------------------------------------------------------------
// Arrival
// ---------------------------------------------------------------------------

Refusal Scheduler::Add(Request request, std::shared_ptr<EngineSink> sink) {
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  KVASIR_CHECK(request.sampling.n() <= options_.max_num_seqs);
  bool is_live = false;
  if (const auto found = requests_.find(request.request_id);
      found != requests_.end()) {
    for (const auto& state : found->second) {
      is_live |= state->request.attempt == request.attempt;
    }
  }
  if (Refusal refusal = admission_.CheckPlace(
          request, {.num_queued = num_queued_, .is_live = is_live});
      !refusal.ok()) {
    return refusal;
  }

  const absl::Time now = deps_.clock->Now();
  auto owned = std::make_unique<RequestState>();
  RequestState& state = *owned;
  state.request = std::move(request);
  state.sink = std::move(sink);
  state.order = next_order_++;
  InitRequest(&state, now);
  requests_[state.request.request_id].push_back(std::move(owned));
  ++num_queued_;
  earliest_expiry_ =
      std::min({earliest_expiry_, state.request.deadline, state.start_by});

  state.sink->OnAccepted(state.prompt_tokens());
  // Earlier attempts may already have delivered the complete output.
  if (state.output_tokens(state.samples[0]) == 0 ||
      !EndIfComplete(&state.samples[0], now)) {
    Enqueue(&state.samples[0]);
  }
  return {};
}

void Scheduler::InitRequest(RequestState* state, absl::Time now) const {
  Request& request = state->request;
  const kvasir::v1::SamplingParams& sampling = request.sampling;
  if (request.arrival == absl::InfinitePast()) request.arrival = now;
  state->start_by =
      request.arrival + (request.queue_timeout == absl::ZeroDuration()
                             ? options_.queue_timeout
                             : request.queue_timeout);
  state->stop_ids.assign(sampling.stop_token_ids().begin(),
                         sampling.stop_token_ids().end());
  if (!sampling.ignore_eos()) {
    state->stop_ids.insert(state->stop_ids.end(),
                           options_.eos_token_ids.begin(),
                           options_.eos_token_ids.end());
  }
  std::sort(state->stop_ids.begin(), state->stop_ids.end());
  state->stop_ids.erase(
      std::unique(state->stop_ids.begin(), state->stop_ids.end()),
      state->stop_ids.end());
  state->has_penalties = sampling.repetition_penalty() != 1.0f ||
                         sampling.presence_penalty() != 0.0f ||
                         sampling.frequency_penalty() != 0.0f;
  state->logit_bias.assign(sampling.logit_bias().begin(),
                           sampling.logit_bias().end());
  std::sort(state->logit_bias.begin(), state->logit_bias.end());
  state->num_prompt_tokens =
      static_cast<uint32_t>(request.prompt.size_tokens());
  state->max_total_tokens = std::min<uint64_t>(
      uint64_t{state->prompt_tokens()} + sampling.max_tokens(),
      options_.max_model_len);
  if (request.eviction_budget.has_value()) {
    state->evictions = EvictionsOf(*request.eviction_budget, options_.eviction);
  }

  state->samples.resize(sampling.n());
  state->unfinished = sampling.n();
  state->pending_forks = sampling.n() - 1;
  for (uint32_t i = 0; i < sampling.n(); ++i) {
    Sequence& sequence = state->samples[i];
    sequence.request = state;
    sequence.sample_index = i;
    sequence.state = Sequence::State::kPending;
  }
  std::vector<int32_t>& tokens = state->samples[0].tokens;
  tokens.reserve(request.prompt.size_tokens() + request.emitted.size_tokens() +
                 std::min<size_t>(sampling.max_tokens(), kTokensReserve));
  tokens = request.prompt.AppendTo(std::move(tokens));
  tokens = request.emitted.AppendTo(std::move(tokens));
  request.prompt = {};
  request.emitted = {};
}

void Scheduler::Enqueue(Sequence* sequence) {
  sequence->state = Sequence::State::kWaiting;
  if (!sequence->image.has_value()) sequence->computed = 0;
  sequence->sampled_step = 0;
  sequence->known_to_executor = false;
  sequence->history_sent = false;
  waiting_.insert(sequence);
  sequence->queued_tokens = sequence->to_run();
  queued_tokens_ += sequence->queued_tokens;
}

void Scheduler::LeaveQueue(Sequence* sequence) {
  waiting_.erase(sequence);
  queued_tokens_ -= sequence->queued_tokens;
}

void Scheduler::EnterBatch(Sequence* sequence) {
  sequence->state = Sequence::State::kRunning;
  seats_ += sequence->seats();
  running_.insert(std::upper_bound(running_.begin(), running_.end(), sequence,
                                   RunsBefore()),
                  sequence);
}

// Does not change the cache: the caller must release the sequence's pages or
// copy them to the host pool.
void Scheduler::LeaveBatch(Sequence* sequence) {
  const auto at = std::lower_bound(running_.begin(), running_.end(), sequence,
                                   RunsBefore());
  KVASIR_CHECK(at != running_.end() && *at == sequence);
  running_.erase(at);
  seats_ -= sequence->seats();
  if (sequence->known_to_executor) plan_.Release(sequence->id);
  for (size_t i = 0; i < steps_.size(); ++i) {
    int32_t& index = sequence->plan_index[i];
    if (index < 0) continue;
    steps_[i].sequences[static_cast<size_t>(index)].sequence = nullptr;
    index = -1;
  }
}

// ---------------------------------------------------------------------------
// End
// ---------------------------------------------------------------------------

bool Scheduler::EndIfComplete(Sequence* sequence, absl::Time now) {
  const RequestState& state = *sequence->request;
  const int32_t last = sequence->tokens.back();
  if (std::binary_search(state.stop_ids.begin(), state.stop_ids.end(), last)) {
    Finish(sequence, kvasir::v1::FINISH_STOP, last, now);
    return true;
  }
  if (sequence->tokens.size() >= state.max_total_tokens) {
    Finish(sequence, kvasir::v1::FINISH_LENGTH, std::nullopt, now);
    return true;
  }
  return false;
}

void Scheduler::Finish(Sequence* sequence, kvasir::v1::FinishReason reason,
                       std::optional<int32_t> matched, absl::Time now) {
  RequestState& state = *sequence->request;
  Leave(sequence);
  const uint32_t output_tokens =
      // A sample that has not been forked from sample 0 has no tokens yet.
      sequence->tokens.empty() ? 0 : state.output_tokens(*sequence);
  const Phases phases = PhasesOf(state, *sequence, now);
  kvasir::v1::GenerateEvent::Finish finish;
  finish.set_index(sequence->sample_index);
  finish.set_reason(reason);
  if (matched.has_value()) finish.set_matched_token_id(*matched);
  finish.set_prompt_tokens(state.prompt_tokens());
  finish.set_output_tokens(output_tokens);
  finish.set_cached_tokens(state.cached_tokens);
  finish.set_queue_us(Microseconds(phases.queue));
  finish.set_prefill_us(Microseconds(phases.prefill));
  finish.set_decode_us(Microseconds(phases.decode));
  finish.set_preemptions(sequence->preemptions);
  const bool last = --state.unfinished == 0;
  state.summary.output_tokens += output_tokens;
  state.summary.aborted |= reason == kvasir::v1::FINISH_ABORT;
  if (sequence->sample_index == 0) {
    state.summary.reason = reason;
    Summarize(phases, &state.summary);
  }
  state.sink->OnFinished(finish, last);
  if (last) EndRequest(&state, now);
}

// Removes the sequence from the queue or batch and releases its pages.
void Scheduler::Leave(Sequence* sequence) {
  if (sequence->state == Sequence::State::kWaiting) {
    LeaveQueue(sequence);
    sequence->image.reset();
  }
  if (sequence->state == Sequence::State::kRunning) {
    deps_.cache->Release(sequence->cache_id());
    LeaveBatch(sequence);
  }
  sequence->state = Sequence::State::kFinished;
}

void Scheduler::AbortRequest(RequestState* state) {
  const absl::Time now = deps_.clock->Now();
  for (Sequence& sequence : state->samples) {
    if (sequence.state == Sequence::State::kFinished) continue;
    Finish(&sequence, kvasir::v1::FINISH_ABORT, std::nullopt, now);
  }
}

void Scheduler::FailRequest(RequestState* state, const Refusal& why) {
  const absl::Time now = deps_.clock->Now();
  for (Sequence& sequence : state->samples) {
    if (sequence.state == Sequence::State::kFinished) continue;
    if (sequence.sample_index == 0) {
      Summarize(PhasesOf(*state, sequence, now), &state->summary);
    }
    if (!sequence.tokens.empty()) {
      state->summary.output_tokens += state->output_tokens(sequence);
    }
    Leave(&sequence);
  }
  state->summary.reason.reset();
  state->summary.status = why.status;
  state->summary.refusal = why.reason;
  state->sink->OnFailed(why);
  EndRequest(state, now);
}

void Scheduler::EndRequest(RequestState* state, absl::Time now) {
  if (!state->started) --num_queued_;
  RequestSummary& summary = state->summary;
  summary.request_id = state->request.request_id;
  summary.attempt = state->request.attempt;
  summary.tenant = state->request.tenant;
  summary.prompt_tokens = state->prompt_tokens();
  summary.cached_tokens = state->cached_tokens;
  summary.end_to_end = now - state->request.arrival;
  if (deps_.observer != nullptr) deps_.observer->OnRequestEnd(summary);

  const auto found = requests_.find(state->request.request_id);
  auto& attempts = found->second;
  const auto at =
      std::find_if(attempts.begin(), attempts.end(),
                   [&](const auto& owned) { return owned.get() == state; });
  ended_.push_back(std::move(*at));
  attempts.erase(at);
  if (attempts.empty()) requests_.erase(found);
}

int Scheduler::Abort(std::string_view request_id,
                     std::optional<uint32_t> attempt) {
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  const auto found = requests_.find(AbslView(request_id));
  if (found == requests_.end()) return 0;
  std::vector<RequestState*> matches;
  for (const auto& state : found->second) {
    if (!attempt.has_value() || state->request.attempt == *attempt) {
      matches.push_back(state.get());
    }
  }
  for (RequestState* state : matches) AbortRequest(state);
  return static_cast<int>(matches.size());
}

void Scheduler::RefuseAll(const Refusal& why) {
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  for (RequestState* state : LiveRequests()) FailRequest(state, why);
}

void Scheduler::FailAll(const Refusal& why) {
  num_planned_ = 0;
  RefuseAll(why);
}

std::vector<RequestState*> Scheduler::LiveRequests() const {
  std::vector<RequestState*> all;
  for (const auto& [id, attempts] : requests_) {
    for (const auto& state : attempts) all.push_back(state.get());
  }
  std::sort(all.begin(), all.end(),
            [](const auto* a, const auto* b) { return a->order < b->order; });
  return all;
}

std::vector<SequenceSnapshot> Scheduler::Snapshot() const {
  std::vector<SequenceSnapshot> all;
  const auto add = [&](const Sequence& sequence, bool running) {
    all.push_back({.request_id = sequence.request->request.request_id,
                   .sample_index = sequence.sample_index,
                   .sequence_id = sequence.id,
                   .running = running,
                   .priority = sequence.priority(),
                   .num_tokens = static_cast<uint32_t>(sequence.tokens.size()),
                   .computed_tokens = sequence.computed,
                   .preemptions = sequence.preemptions});
  };
  for (const Sequence* sequence : running_) add(*sequence, true);
  for (const Sequence* sequence : waiting_) add(*sequence, false);
  return all;
}

LoadSnapshot Scheduler::Load() const {
  LoadSnapshot load;
  load.step = step_id_ - num_planned_;
  load.running = num_running();
  load.waiting = num_waiting();
  load.queued_tokens = queued_tokens_;
  for (int64_t g = 0; g < deps_.cache->num_page_groups(); ++g) {
    const cache::PageGroupId group(static_cast<int32_t>(g));
    load.free_pages +=
        static_cast<uint64_t>(deps_.cache->available_pages(group));
    load.total_pages += static_cast<uint64_t>(deps_.cache->num_pages(group));
  }
  return load;
}

}  // namespace kvasir::worker
