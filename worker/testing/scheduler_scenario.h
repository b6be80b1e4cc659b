// A small language for scheduler tests: one command per line, `#` comments.
//
//   pool page_tokens=4 pages=16        sets up the cache, with pages of 128
//     side=0 host=0                    bytes; comes before the first submit
//   group pages=8 window=6 host=0      adds a page group with a sliding window
//     keep=6 every=4                   evicts every 4 tokens and keeps 6 slots
//   options seqs=4 batch=16 queue=8    sets the scheduler's options
//     len=64 timeout=10s eos=7         more options
//     copy_rate=4000                   more options
//   submit a prompt=40 max=5           submits a request with the name a
//     n=2 prio=1 emitted=3 seed=9      optional fields of the request
//     temp=1 min=2 stop=17 attempt=1   more fields
//     deadline=5s queue_timeout=2s     more fields
//     text=b salt=t logprobs=2         more fields
//     prompt_logprobs penalties        more fields
//     budget=0.5                       the request's own eviction budget
//   schedule                           makes a plan
//   apply                              executes the plan, applies its result
//   step [N]                           schedule and apply, N times
//   run                                steps until no request is left
//   ahead                              makes the plan after the current one
//   abort a                            aborts the request
//   advance 3s                         advances the clock
//   expect running a b#1               running samples, in serving order
//   expect waiting c                   waiting samples, in serving order
//   expect plan a:1 b:7                tokens in the last plan, prompts first
//   expect free 12                     free pages, over all page groups
//   expect finished a=length b=stop    how all samples of a request finished
//   expect failed a=DEADLINE_EXCEEDED  status code of the failed request
//   expect refused a=RESOURCE_EXHAUSTED/retry   how a's last submit was refused
//   expect output a                    a's output is that of FakeContinuation
//   expect tokens a 5                  tokens of sample 0 delivered so far
//   expect tails 2                     pages of tails, over all page groups
//   expect cached a 8                  cached tokens that a's finish reports
//   expect preempted a 2               preemptions that a's finish reports
//   expect host 3                      pages of the host pool in use
//   expect moved 4 3                   pages copied to the host, and back
//   expect evicted 12                  evicted slots, over all page groups
//   expect idle                        no live request, every page free
//
// In `expect`, the word none stands for an empty list of samples or an empty
// plan. After `ahead`, the next apply first enqueues the plan that `ahead`
// made, and then applies the current plan. The enqueued plan becomes the
// current plan.
//
// A prompt's ids are made from a name: the request's own or that in text=.
// Equal names give equal ids, and a shorter prompt is a prefix of a longer one.
// The fake executor and the cache's invariants check every step.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "cache/kv_cache.h"
#include "worker/engine/scheduler.h"
#include "worker/testing/fake_executor.h"
#include "worker/testing/recording_sink.h"

namespace kvasir::worker {

// Runs scripts of this language on a scheduler with a fake executor.
//
// Threads: one thread at a time may call methods.
// Errors: gtest failures, which name the line of the script.
class Scenario {
 public:
  Scenario();
  void Run(std::string_view script);

  // The request that the script submitted under this name.
  const Request& request(const std::string& name) const {
    return Of(name).request;
  }
  const RecordingSink& sink(const std::string& name) const {
    return *Of(name).sink;
  }
  Scheduler& scheduler() { return *scheduler_; }

 private:
  struct Line {
    std::vector<std::string> words;  // including the key=value words
    std::map<std::string, std::string> arguments;  // the key=value words
    std::string Argument(const std::string& key,
                         const std::string& otherwise) const;
    int64_t Number(const std::string& key, int64_t otherwise) const;
    absl::Duration Time(const std::string& key, absl::Duration otherwise) const;
  };
  struct Submitted {
    Request request;
    std::shared_ptr<RecordingSink> sink;
    Refusal refusal;
  };

  static plan::EvictionCounts EvictionOf(const Line& line);
  static Line Parse(std::string_view text);
  void RunLine(const Line& line);
  void Build();
  void Submit(const Line& line);
  void Schedule();
  void ScheduleAhead();
  void NamePlan(const kvasir::v1::StepPlan* plan);
  void ExecuteAndApply();
  void CheckInvariants();
  void Expect(const Line& line);
  void ExpectEnds(const Line& line);
  void ExpectRefused(const Line& line);
  void ExpectOutput(const std::string& name);
  std::string Names(bool running) const;
  int64_t HostPages() const;
  FakeModelLimits Limits() const;
  const Submitted& Of(const std::string& name) const;

  base::ManualClock clock_;
  SchedulerOptions options_;
  FakeExecutorOptions fake_;
  std::unique_ptr<cache::KvCache> cache_;
  std::unique_ptr<FakeExecutor> executor_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<std::string, Submitted> submitted_;
  const kvasir::v1::StepPlan* plan_ = nullptr;
  bool plan_runs_ = false;  // whether `plan_` is enqueued
  const kvasir::v1::StepPlan* ahead_ = nullptr;
  std::string last_plan_;
};

// Returns the token ids of a text with this name. Equal names give equal ids,
// and a shorter text is a prefix of a longer one.
std::vector<int32_t> FakePrompt(std::string_view name, size_t num_tokens,
                                int32_t vocab_size);

}  // namespace kvasir::worker
