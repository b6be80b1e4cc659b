// The scheduler's state of a request and of its samples. Only the scheduler
// uses it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cache/kv_cache.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

struct RequestState;

// The most steps that are planned and not yet applied: the running one and the
// next one.
inline constexpr size_t kMostPlannedSteps = 2;

// One sample of a request. Its tokens are
//
//   tokens:  |-- prompt --|-- output (emitted before, then sampled) --|
//            |------ computed: in the cache ------|-- to run --|
//
// The sequence decodes if one token is left to run, and prefills if more are
// left. After a preemption the output is prefilled again like a prompt, unless
// the pages were copied to the host pool.
struct Sequence {
  enum class State {
    kWaiting,  // in Scheduler::waiting_; holds no pages except in `image`
    kRunning,  // in Scheduler::running_; holds pages
    kPending,  // a later sample: waits for sample 0 to prefill the prompt
    kFinished,
  };

  RequestState* request = nullptr;
  uint32_t sample_index = 0;
  State state = State::kWaiting;
  // The sequence's id in step plans. Each start assigns a new id, because an id
  // that the executor has released must not be used again.
  uint64_t id = 0;

  std::vector<int32_t> tokens;
  uint32_t computed = 0;
  // The id of the step that sampled tokens.back(). 0: no token was sampled
  // since the last start.
  uint64_t sampled_step = 0;
  bool known_to_executor = false;
  // Whether a plan has sampled from the sequence since its last start. The
  // first such plan also sends the sequence's tokens if they are needed
  // for penalties.
  bool history_sent = false;

  // The copy of the sequence's pages in the host pool. Set while the sequence
  // waits after a preemption that copied its pages.
  std::optional<cache::SequenceImage> image;
  // This sequence's share of Scheduler::queued_tokens_.
  uint64_t queued_tokens = 0;

  // The sequence's index in each plan that is not yet applied; -1: not in the
  // plan. Element i is for the step whose id % kMostPlannedSteps is i.
  std::array<int32_t, kMostPlannedSteps> plan_index = {-1, -1};

  uint32_t preemptions = 0;
  absl::Time first_token = absl::InfiniteFuture();
  absl::Time last_token = absl::InfiniteFuture();

  cache::SequenceId cache_id() const {
    return cache::SequenceId(static_cast<int64_t>(id));
  }
  uint32_t to_run() const {
    return static_cast<uint32_t>(tokens.size()) - computed;
  }
  int32_t priority() const;
  // How many of a step's max_num_seqs seats this sequence takes: one, and one
  // more for each sample that will be forked from it.
  uint32_t seats() const;
};

struct RequestState {
  // The request, except its tokens, which InitRequest moves to the samples.
  Request request;
  uint32_t num_prompt_tokens = 0;
  std::shared_ptr<EngineSink> sink;
  uint64_t order = 0;  // the request's number in order of arrival
  std::vector<Sequence> samples;

  // Number of samples that wait until sample 0 has prefilled the prompt. Each
  // has a reserved seat.
  uint32_t pending_forks = 0;
  uint32_t unfinished = 0;

  // Token ids that end the output, sorted. They are banned while the output is
  // shorter than min_tokens.
  std::vector<int32_t> stop_ids;
  bool has_penalties = false;
  // SamplingParams::logit_bias sorted by token id, because the message's map
  // has no fixed order.
  std::vector<std::pair<int32_t, float>> logit_bias;
  uint64_t max_total_tokens = 0;  // limit of prompt and output tokens together
  // The request's eviction budget as counts for each page group. Empty if the
  // request has no eviction budget.
  std::vector<plan::EvictionCounts> evictions;

  bool started = false;  // whether any sample has been in the batch
  absl::Time start_by;   // when the queue timeout ends the request
  absl::Time first_step = absl::InfiniteFuture();
  uint32_t cached_tokens = 0;
  std::vector<float> prompt_logprobs;
  RequestSummary summary;

  uint32_t prompt_tokens() const { return num_prompt_tokens; }
  uint32_t output_tokens(const Sequence& sequence) const {
    return static_cast<uint32_t>(sequence.tokens.size()) - prompt_tokens();
  }
  bool wants_prompt_logprobs() const {
    return request.sampling.has_prompt_logprobs() &&
           prompt_logprobs.size() + 1 < num_prompt_tokens;
  }
};

inline int32_t Sequence::priority() const { return request->request.priority; }

inline uint32_t Sequence::seats() const {
  return sample_index == 0 ? 1 + request->pending_forks : 1;
}

// The order of service: first lower priority values, then earlier arrivals,
// then lower sample indices. Preemption begins with the last sequence.
struct RunsBefore {
  bool operator()(const Sequence* a, const Sequence* b) const {
    const RequestState& x = *a->request;
    const RequestState& y = *b->request;
    if (x.request.priority != y.request.priority) {
      return x.request.priority < y.request.priority;
    }
    if (x.order != y.order) return x.order < y.order;
    return a->sample_index < b->sample_index;
  }
};

}  // namespace kvasir::worker
