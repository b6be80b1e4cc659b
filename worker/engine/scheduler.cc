#include "worker/engine/scheduler.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "worker/executor/executor.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SequenceResult;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

// The token id that the sampler returns if every token is banned.
constexpr int32_t kNoToken = -1;

cache::StartOptions StartOptionsOf(const Sequence& sequence) {
  const RequestState& state = *sequence.request;
  cache::StartOptions options;
  options.salt = state.request.cache_salt;
  options.publish_prefix = state.request.use_prefix_cache;
  options.prompt_tokens = state.prompt_tokens();
  options.evictions = state.evictions;
  // If log probabilities of the prompt are wanted, every prompt token must run,
  // so no cached prefix is reused.
  options.reuse_prefix =
      state.request.use_prefix_cache &&
      !(sequence.sample_index == 0 && state.wants_prompt_logprobs());
  return options;
}

absl::Status CheckOptions(const SchedulerOptions& o,
                          const cache::KvCache& cache) {
  if (o.max_model_len < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_model_len is ", o.max_model_len, ", want at least 2"));
  }
  if (o.max_num_seqs < 1) {
    return absl::InvalidArgumentError("max_num_seqs is 0, want at least 1");
  }
  if (o.max_batched_tokens < o.max_num_seqs) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_batched_tokens is ", o.max_batched_tokens,
                     ", want at least max_num_seqs ", o.max_num_seqs,
                     ": every running sequence decodes in every step"));
  }
  if (o.max_queue < 1) {
    return absl::InvalidArgumentError("max_queue is 0, want at least 1");
  }
  if (!(o.copy_bytes_per_second > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("copy_bytes_per_second is ",
                                                   o.copy_bytes_per_second,
                                                   ", want more than 0"));
  }
  for (int32_t id : o.eos_token_ids) {
    if (id < 0 || id >= o.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("end-of-sequence id is ", id,
                       ", want 0 <= id < vocabulary size ", o.vocab_size));
    }
  }
  for (int64_t g = 0; g < cache.num_page_groups(); ++g) {
    const cache::PageGroupId group(static_cast<int32_t>(g));
    const int64_t need =
        cache.sequence_pages(group).Held(o.max_model_len, o.max_batched_tokens);
    if (need > cache.num_pages(group)) {
      return absl::InvalidArgumentError(
          absl::StrCat("one sequence of max_model_len ", o.max_model_len,
                       " tokens needs ", need, " pages of page group ", g,
                       ", which has ", cache.num_pages(group),
                       ": lower max_model_len or raise the cache's bytes"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(
    const SchedulerOptions& options, const SchedulerDeps& deps) {
  KVASIR_RETURN_IF_ERROR(CheckOptions(options, *deps.cache));
  return std::unique_ptr<Scheduler>(new Scheduler(options, deps));
}

Scheduler::Scheduler(const SchedulerOptions& options, const SchedulerDeps& deps)
    : options_(options), deps_(deps), admission_({}, options.max_queue) {
  running_.reserve(options.max_num_seqs);
}

Scheduler::~Scheduler() = default;

// ---------------------------------------------------------------------------
// Planning a step
// ---------------------------------------------------------------------------

// Plans running sequences in the order of service (RunsBefore). To free pages,
// preempts the last sequence of that order, which is never one that is already
// planned. Plans a waiting request before running sequences of lower priority.
const StepPlan* Scheduler::Schedule() {
  KVASIR_CHECK(num_planned_ == 0);
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  const absl::Time now = deps_.clock->Now();
  stats_ = StepStats();
  EndOverdue(now);
  plan_.Begin();

  // One token is reserved for each sequence that decodes. Prefill chunks share
  // the rest.
  prefill_budget_ = options_.max_batched_tokens;
  for (const Sequence* sequence : running_) {
    if (sequence->to_run() == 1) --prefill_budget_;
  }
  bool pages_ran_out = false;
  for (size_t i = 0; i < running_.size(); ++i) {
    while (!waiting_.empty() && i < running_.size() &&
           (*waiting_.begin())->priority() < running_[i]->priority()) {
      const size_t admitted = TryAdmit(i, now);
      if (admitted == 0) break;
      i += admitted;
    }
    if (i == running_.size()) break;
    if (!PlanSequence(running_[i], i + 1)) pages_ran_out = true;
  }
  // A step that preempts a sequence admits none. Otherwise the preempted
  // sequence could start at once and be preempted again.
  while (!waiting_.empty() && !pages_ran_out && stats_.preemptions == 0) {
    if (TryAdmit(running_.size(), now) == 0) break;
  }
  return BuildStep(now);
}

const StepPlan* Scheduler::BuildStep(absl::Time now) {
  if (plan_.empty()) return nullptr;
  Step& step = StepOf(++step_id_);
  step.planned_at = now;
  step.stats = stats_;
  plan_.Build(step_id_, deps_.cache, deps_.token_masks, &step);
  ++num_planned_;
  return &step.plan;
}

const StepPlan* Scheduler::ScheduleAhead() {
  KVASIR_CHECK(num_planned_ == 1);
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  const absl::Time now = deps_.clock->Now();
  EndOverdue(now);
  if (!CanRunAhead()) return nullptr;
  stats_ = StepStats();
  plan_.Begin();
  for (Sequence* sequence : running_) {
    // This sequence reaches its maximum length in the running step and
    // ends there.
    if (sequence->tokens.size() + 1 >= sequence->request->max_total_tokens) {
      continue;
    }
    const PlannedSequence& runs = *LastPartOf(*sequence);
    // If pages run out here, other sequences keep their reserved slots, because
    // the next step needs these slots in any case.
    if (!deps_.cache->Reserve(sequence->cache_id(),
                              int64_t{runs.num_tokens} + 1)) {
      return nullptr;
    }
    plan_.Add({.sequence = sequence,
               .sequence_id = sequence->id,
               .start = runs.start + runs.num_tokens,
               .num_tokens = 1,
               .samples = true,
               .decodes = true,
               .ahead = true});
    ++stats_.decode_sequences;
  }
  return BuildStep(now);
}

bool Scheduler::CanRunAhead() const {
  if (!deps_.cache->can_run_ahead()) return false;
  if (!waiting_.empty() && !MustWait(**waiting_.begin())) return false;
  return std::all_of(
      running_.begin(), running_.end(), [this](const Sequence* sequence) {
        const PlannedSequence* const part = LastPartOf(*sequence);
        // A sequence without a part in the running step lacked token budget or
        // pages. It cannot be planned ahead.
        if (part == nullptr || !part->samples) return false;
        if (!sequence->request->request.sampling.token_mask().empty()) {
          return false;
        }
        const std::optional<int64_t> evicts =
            deps_.cache->next_eviction(sequence->cache_id());
        return !evicts || part->start + part->num_tokens < *evicts;
      });
}

const PlannedSequence* Scheduler::LastPartOf(const Sequence& sequence) const {
  const size_t slot = step_id_ % kMostPlannedSteps;
  const int32_t index = sequence.plan_index[slot];
  return index < 0 ? nullptr
                   : &steps_[slot].sequences[static_cast<size_t>(index)];
}

bool Scheduler::MustWait(const Sequence& sequence) const {
  if (running_.empty() || running_.back()->priority() > sequence.priority()) {
    return false;
  }
  // LackedPages is true if the sum of free pages over all page groups has not
  // grown since they did not suffice. But the group that had too few may have
  // gained some while others lost more. So PagesSuffice checks each group.
  return seats_ + sequence.seats() > options_.max_num_seqs ||
         (!PagesSuffice(sequence, 0) && LackedPages(sequence));
}

void Scheduler::EndOverdue(absl::Time now) {
  if (now < earliest_expiry_) return;
  earliest_expiry_ = absl::InfiniteFuture();
  for (RequestState* state : LiveRequests()) {
    const absl::Time deadline = state->request.deadline;
    if (now >= deadline) {
      FailRequest(state, Admission::DeadlinePassed(state->started));
      continue;
    }
    if (!state->started && now >= state->start_by) {
      FailRequest(
          state, Admission::QueueTimeout(
                     state->request, state->start_by - state->request.arrival));
      continue;
    }
    earliest_expiry_ =
        std::min({earliest_expiry_, deadline,
                  state->started ? absl::InfiniteFuture() : state->start_by});
  }
}

size_t Scheduler::TryAdmit(size_t victims_from, absl::Time now) {
  Sequence* sequence = *waiting_.begin();
  const auto can_preempt = [&] {
    return running_.size() > victims_from &&
           running_.back()->priority() > sequence->priority();
  };
  const auto preempt_lower = [&] {
    if (!can_preempt()) return false;
    Preempt(running_.back());
    return true;
  };
  const auto lacks_seats = [&] {
    return seats_ + sequence->seats() > options_.max_num_seqs;
  };
  // If the token budget is spent, the sequence can start only by preempting a
  // sequence that decodes, which frees one token of the budget.
  if (prefill_budget_ == 0 &&
      !(lacks_seats() && can_preempt() && running_.back()->to_run() == 1)) {
    return 0;
  }
  while (lacks_seats()) {
    if (!preempt_lower()) return 0;
  }
  while (!HasRoomFor(*sequence) || !Start(sequence, now)) {
    if (!preempt_lower()) return 0;
  }
  const size_t before = running_.size();
  LeaveQueue(sequence);
  EnterBatch(sequence);
  ForkIfReady(sequence);
  if (sequence->to_run() == 1) --prefill_budget_;
  PlanSequence(sequence, running_.size());
  return running_.size() - before;
}

// Requires pages for all tokens of the sequence and one more, not only for the
// first chunk. Otherwise the prefill might be preempted half-way, and its work
// would be lost.
bool Scheduler::HasRoomFor(const Sequence& sequence) {
  if (running_.empty() || PagesSuffice(sequence, 0)) {
    return true;
  }
  // The look-up below hashes the whole prompt. So it is repeated only if
  // another sequence has become the first to wait, pages have become free, or a
  // prefill has run.
  if (LackedPages(sequence)) return false;
  prefix_grew_ = false;
  blocked_order_ = sequence.request->order;
  blocked_pages_ = Load().free_pages;
  // If the sequence can decode as soon as its image (the copy in the host pool)
  // is imported, it needs hardly more pages than the image. With a sliding
  // window PagesSuffice would require more, so only Import checks free pages.
  if (sequence.image.has_value() && sequence.to_run() == 1) return true;
  // This check assumes that running sequences hold all pages of the cached
  // prefix, so that sharing these pages takes no free page. The assumption may
  // be wrong, so Start checks again.
  const int64_t cached = deps_.cache->CachedPrefixTokens(
      sequence.tokens, StartOptionsOf(sequence));
  return cached > 0 && PagesSuffice(sequence, cached);
}

bool Scheduler::LackedPages(const Sequence& sequence) const {
  return sequence.request->order == blocked_order_ &&
         Load().free_pages <= blocked_pages_ && !prefix_grew_;
}

cache::SequencePages Scheduler::PagesOf(const RequestState& state,
                                        cache::PageGroupId group) const {
  cache::SequencePages pages = deps_.cache->sequence_pages(group);
  if (!state.evictions.empty()) {
    pages.eviction = state.evictions[static_cast<size_t>(group.value())];
  }
  pages.eviction = cache::OfPrompt(pages.eviction, state.prompt_tokens());
  return pages;
}

bool Scheduler::PagesSuffice(const Sequence& sequence, int64_t found_tokens,
                             bool is_started) const {
  const auto length = static_cast<int64_t>(
      std::min<uint64_t>(sequence.tokens.size() + 1, options_.max_model_len));
  for (int64_t g = 0; g < deps_.cache->num_page_groups(); ++g) {
    const cache::PageGroupId group(static_cast<int32_t>(g));
    const int64_t available =
        is_started ? deps_.cache->available_pages(sequence.cache_id(), group)
                   : deps_.cache->available_pages(group);
    if (PagesOf(*sequence.request, group)
            .Missing(length, options_.max_batched_tokens, found_tokens) >
        available) {
      return false;
    }
  }
  return true;
}

bool Scheduler::Start(Sequence* sequence, absl::Time now) {
  RequestState& state = *sequence->request;
  sequence->id = next_sequence_id_++;
  if (sequence->image.has_value()) return StartFromImage(sequence);
  if (!StartAnew(sequence)) return false;
  if (sequence->sample_index == 0 && state.wants_prompt_logprobs()) {
    state.prompt_logprobs.clear();  // may be left from a preempted prefill
  }
  if (!state.started) {
    state.started = true;
    state.first_step = now;
    state.cached_tokens = std::min(sequence->computed, state.prompt_tokens());
    --num_queued_;
  }
  return true;
}

bool Scheduler::StartAnew(Sequence* sequence) {
  const cache::StartResult started = deps_.cache->StartSequence(
      sequence->cache_id(), sequence->tokens, StartOptionsOf(*sequence));
  if (!running_.empty() && !PagesSuffice(*sequence, started.cached_tokens,
                                         /*is_started=*/true)) {
    deps_.cache->Release(sequence->cache_id());
    return false;
  }
  sequence->computed = static_cast<uint32_t>(started.cached_tokens);
  return true;
}

// After a start from an image, the sequence keeps its computed tokens and their
// log probabilities.
bool Scheduler::StartFromImage(Sequence* sequence) {
  if (!deps_.cache->Import(sequence->cache_id(), &*sequence->image,
                           sequence->tokens, StartOptionsOf(*sequence))) {
    return false;
  }
  sequence->image.reset();
  return true;
}

bool Scheduler::PlanSequence(Sequence* sequence, size_t victims_from) {
  const RequestState& state = *sequence->request;
  const uint32_t prompt = state.prompt_tokens();
  const bool decodes = sequence->to_run() == 1;
  uint32_t want = decodes ? 1 : std::min(sequence->to_run(), prefill_budget_);
  if (sequence->sample_index == 0 && state.pending_forks > 0) {
    want = std::min(want, prompt - 1 - sequence->computed);
  }
  // In one step, a sequence runs either prompt tokens or output tokens, not
  // both.
  if (sequence->computed < prompt) {
    want = std::min(want, prompt - sequence->computed);
  }
  // A step must not pass the position `cut`. There the cache copies the
  // sequence's side pages, which hold uncompressed rows of its latest tokens.
  // Later prompts can reuse the prefix only with this copy (a tail).
  const auto cut =
      static_cast<uint32_t>(deps_.cache->tail_cut(sequence->cache_id()));
  if (sequence->computed < cut) want = std::min(want, cut - sequence->computed);
  if (want == 0) return true;  // the token budget is spent
  // A step must end where an eviction is due. The eviction runs before the next
  // step, which is planned here.
  if (deps_.cache->eviction_due(sequence->cache_id())) {
    deps_.cache->Evict(sequence->cache_id());
  }
  if (const auto next = deps_.cache->next_eviction(sequence->cache_id())) {
    want = static_cast<uint32_t>(
        std::min(int64_t{want}, *next - sequence->computed));
  }
  const uint32_t num_tokens = Grow(*sequence, want, victims_from);
  if (num_tokens == 0) return false;

  const uint32_t end = sequence->computed + num_tokens;
  PlannedSequence planned{.sequence = sequence,
                          .sequence_id = sequence->id,
                          .start = sequence->computed,
                          .num_tokens = num_tokens,
                          .prompt = sequence->computed < prompt,
                          .samples = end == sequence->tokens.size(),
                          .decodes = decodes};
  if (sequence->sample_index == 0 && state.wants_prompt_logprobs()) {
    planned.num_targets = std::min(end, prompt - 1) - planned.start;
  }
  plan_.Add(planned);
  if (decodes) {
    ++stats_.decode_sequences;
  } else {
    prefill_budget_ -= num_tokens;
    ++stats_.prefill_sequences;
    stats_.prefill_tokens += num_tokens;
  }
  return true;
}

uint32_t Scheduler::Grow(const Sequence& sequence, uint32_t want,
                         size_t victims_from) {
  while (true) {
    int64_t tokens = want;
    while (tokens > 0) {
      const cache::ReserveResult reserved =
          deps_.cache->Reserve(sequence.cache_id(), tokens);
      if (reserved) return static_cast<uint32_t>(tokens);
      // Try again with fewer tokens. fits_tokens is only for the page group
      // that was full; another group may have room for even fewer.
      tokens = std::min(reserved.fits_tokens, tokens - 1);
    }
    if (running_.size() <= victims_from) return 0;
    Preempt(running_.back());
  }
}

void Scheduler::Preempt(Sequence* sequence) {
  // Gives back the token of the budget that Schedule reserved for this
  // sequence.
  if (sequence->to_run() == 1) ++prefill_budget_;
  if (ShouldCopy(*sequence)) {
    sequence->image = deps_.cache->Export(sequence->cache_id());
  }
  if (sequence->image.has_value()) {
    ++stats_.preemptions_by_copy;
  } else {
    deps_.cache->Preempt(sequence->cache_id());
  }
  LeaveBatch(sequence);
  ++sequence->preemptions;
  ++sequence->request->summary.preemptions;
  ++stats_.preemptions;
  Enqueue(sequence);
}

bool Scheduler::ShouldCopy(const Sequence& sequence) const {
  const cache::SequenceId id = sequence.cache_id();
  const bool finds_shared = StartOptionsOf(sequence).reuse_prefix;
  return ChoosePreemption(
             {.image_bytes = deps_.cache->ImageBytes(deps_.cache->ShapeOf(id)),
              .recompute_tokens =
                  sequence.computed -
                  (finds_shared ? deps_.cache->SharedTokens(id) : 0),
              .copy_bytes_per_second = options_.copy_bytes_per_second,
              .prefill_tokens_per_second =
                  prefill_rate_.tokens_per_second()}) == Preemption::kCopy;
}

void Scheduler::ForkIfReady(Sequence* leader) {
  RequestState& state = *leader->request;
  if (leader->sample_index != 0 || state.pending_forks == 0 ||
      leader->computed + 1 != state.prompt_tokens()) {
    return;
  }
  seats_ -= state.pending_forks;
  state.pending_forks = 0;
  for (size_t i = 1; i < state.samples.size(); ++i) {
    Sequence& child = state.samples[i];
    child.tokens = leader->tokens;
    if (!deps_.cache->can_fork(leader->cache_id())) {
      // the sample waits in the queue and starts like a request
      Enqueue(&child);
      continue;
    }
    child.computed = leader->computed;
    child.id = next_sequence_id_++;
    deps_.cache->Fork(leader->cache_id(), child.cache_id());
    EnterBatch(&child);
  }
}

// ---------------------------------------------------------------------------
// Applying a step's result
// ---------------------------------------------------------------------------

absl::Status Scheduler::Apply(const StepResult& result) {
  KVASIR_CHECK(num_planned_ > 0);
  const uint64_t step_id = step_id_ - --num_planned_;
  const absl::Cleanup forget_ended = [this] { ended_.clear(); };
  const absl::Time now = deps_.clock->Now();
  if (result.step_id() != step_id) {
    return absl::InternalError(
        absl::StrCat("the executor returned the result of step ",
                     result.step_id(), ", expected step ", step_id));
  }
  Step& step = StepOf(step_id);
  stats_ = step.stats;
  time_to_first_token_.clear();
  inter_token_.clear();
  // Only steps that consist mainly of prefilled tokens are used to measure the
  // prefill rate.
  if (stats_.prefill_tokens > stats_.decode_sequences) {
    prefill_rate_.Add(stats_.prefill_tokens + stats_.decode_sequences,
                      now - step.planned_at);
  }
  int next = 0;
  for (const PlannedSequence& planned : step.sequences) {
    const SequenceResult* found = nullptr;
    if (next < result.sequences_size() &&
        result.sequences(next).sequence_id() == planned.sequence_id) {
      found = &result.sequences(next++);
    }
    if (planned.sequence == nullptr) continue;  // it ended while the step ran
    if (found != nullptr) {
      if (const absl::Status fault = CheckFault(*found); !fault.ok()) {
        FailRequest(planned.sequence->request,
                    {fault, kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
        continue;
      }
    }
    KVASIR_RETURN_IF_ERROR(CheckResult(step_id, planned, found));
    if (planned.samples && found->token_id() == kNoToken) {
      FailRequest(planned.sequence->request, Admission::NoTokenLeft());
      continue;
    }
    ApplyToSequence(step_id, planned, found, now);
  }
  if (next != result.sequences_size()) {
    return absl::InternalError(absl::StrCat(
        "step ", step_id, ": the executor returned a result of sequence ",
        result.sequences(next).sequence_id(),
        ", which is not in the plan or not in the order of the plan"));
  }
  stats_.step_id = step_id;
  stats_.time_to_first_token = time_to_first_token_;
  stats_.inter_token = inter_token_;
  stats_.load = Load();
  return absl::OkStatus();
}

absl::Status Scheduler::CheckResult(uint64_t step_id,
                                    const PlannedSequence& planned,
                                    const SequenceResult* result) const {
  if (!planned.samples && planned.num_targets == 0) return absl::OkStatus();
  if (result == nullptr) {
    return absl::InternalError(absl::StrCat(
        "step ", step_id, " has no result for sequence ", planned.sequence_id));
  }
  if (planned.samples && (result->token_id() < kNoToken ||
                          result->token_id() >= options_.vocab_size)) {
    return absl::InternalError(absl::StrCat(
        "step ", step_id, ", sequence ", planned.sequence_id,
        ": sampled token ", result->token_id(),
        " is outside the vocabulary of ", options_.vocab_size, " tokens"));
  }
  if (result->target_logprobs_size() != static_cast<int>(planned.num_targets)) {
    return absl::InternalError(absl::StrCat(
        "step ", step_id, ", sequence ", planned.sequence_id,
        ": the executor returned ", result->target_logprobs_size(),
        " target log probabilities, expected ", planned.num_targets));
  }
  return absl::OkStatus();
}

void Scheduler::ApplyToSequence(uint64_t step_id,
                                const PlannedSequence& planned,
                                const SequenceResult* result, absl::Time now) {
  Sequence* sequence = planned.sequence;
  sequence->plan_index[step_id % kMostPlannedSteps] = -1;
  deps_.cache->Commit(sequence->cache_id(),
                      absl::MakeConstSpan(sequence->tokens)
                          .subspan(planned.start, planned.num_tokens));
  sequence->computed += planned.num_tokens;
  prefix_grew_ |= !planned.decodes;
  if (planned.num_targets > 0) {
    std::vector<float>& logprobs = sequence->request->prompt_logprobs;
    logprobs.insert(logprobs.end(), result->target_logprobs().begin(),
                    result->target_logprobs().end());
  }
  if (planned.samples) {
    Deliver(step_id, sequence, *result, now);
  } else {
    ForkIfReady(sequence);
  }
}

void Scheduler::Deliver(uint64_t step_id, Sequence* sequence,
                        const SequenceResult& result, absl::Time now) {
  RequestState& state = *sequence->request;
  const kvasir::v1::SamplingParams& sampling = state.request.sampling;
  sequence->tokens.push_back(result.token_id());
  sequence->sampled_step = step_id;
  ++stats_.sampled_tokens;

  const bool first = sequence->first_token == absl::InfiniteFuture();
  if (first) {
    sequence->first_token = now;
    time_to_first_token_.push_back(now - state.request.arrival);
  } else {
    inter_token_.push_back(now - sequence->last_token);
  }
  sequence->last_token = now;

  tokens_.Clear();
  tokens_.set_index(sequence->sample_index);
  tokens_.add_token_ids(result.token_id());
  if (sampling.has_logprobs()) {
    kvasir::v1::TokenLogprob* const logprob = tokens_.add_logprobs();
    logprob->set_logprob(result.logprob());
    for (const auto& top : result.top()) {
      kvasir::v1::TokenLogprob::Top* const to = logprob->add_top();
      to->set_token_id(top.token_id());
      to->set_logprob(top.logprob());
    }
  }
  if (first && sequence->sample_index == 0) {
    for (const float logprob : state.prompt_logprobs) {
      tokens_.add_prompt_logprobs()->set_logprob(logprob);
    }
  }
  state.sink->OnTokens(tokens_);
  // The log probabilities of a prompt take much memory. Release it, because
  // tokens_ is reused.
  if (tokens_.prompt_logprobs_size() > 0) tokens_ = {};
  EndIfComplete(sequence, now);
}

}  // namespace kvasir::worker
