// Test support: one worker, with its scheduler and the real executor on a tiny
// model, and requests of every kind.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/kv_cache.h"
#include "worker/engine/scheduler.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/recording_sink.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {

inline constexpr uint32_t kMaxLen = 128;

struct Conditions {
  int threads = 1;
  int64_t page_tokens = 16;
  uint32_t max_num_seqs = 16;
  uint32_t max_batched_tokens = 64;
  // The number of pages in each page group of the pool, and of the host pool.
  int64_t pages = 256;
  int64_t host_pages = 0;
  bool one_at_a_time = false;
  bool deterministic = true;
  kernels::CpuBackend backend = kernels::CpuBackend::kSimd;
  // Above 0: the worker runs on a reference CPU device with this
  // Device::page_granule_bytes.
  int64_t granule_bytes = 0;
  uint32_t max_model_len = kMaxLen;
  std::function<void(const LogitsRow&)> logits_tap;
};

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<float> numbers;  // all reported log probabilities
  friend bool operator==(const Sample&, const Sample&) = default;
};

// Model, cache and scheduler of one worker.
class Worker {
 public:
  // `sliding_window` applies only to layer 1; 0: none. Without `plan_case` the
  // plan is full rank. `dtype` is the type of the values that the plan case
  // stores without quantization.
  Worker(const Conditions& conditions, int64_t sliding_window,
         const PlanCase* plan_case = nullptr,
         const model::ModelShape& shape = TinyShape(),
         const std::string& dtype = "BF16");
  // A worker for any model and plan.
  Worker(const Conditions& conditions, const model::DecoderSpec& spec,
         const kvasir::v1::KvPlan& plan, WeightSource* source);
  ~Worker();

  // Runs the requests and returns the samples of all of them, in the order of
  // the requests.
  std::vector<Sample> Run(const std::vector<Request>& requests);

  // Runs the requests and aborts those with odd numbers. Requests 1, 5, ... are
  // aborted during a step of their prompt. Requests 3, 7, ... are aborted
  // between two steps of their output. Returns the samples of the other
  // requests.
  std::vector<Sample> RunAndAbortOdd(const std::vector<Request>& requests);

  cache::KvCacheStats stats() const { return cache_->Stats(); }
  // The number of steps that were planned while the previous step ran. Steps
  // are planned ahead whenever possible, except if requests run one at a time.
  int64_t steps_ahead() const { return steps_ahead_; }
  bool can_run_ahead() const { return cache_->can_run_ahead(); }
  Rank& rank() { return *rank_; }

 private:
  using Sinks = std::vector<std::shared_ptr<RecordingSink>>;

  void Start(const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
             WeightSource* source);
  std::shared_ptr<RecordingSink> Add(const Request& request);
  // Runs steps until no request is left. Calls look(true) during each step and
  // look(false) after it.
  void Finish(const std::function<void(bool during_step)>& look = [](bool) {});
  // Returns the samples of requests that have ended. Checks that no page is in
  // use.
  std::vector<Sample> SamplesOf(const Sinks& sinks);

  const Conditions conditions_;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<cache::KvCache> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t steps_ahead_ = 0;
};

std::vector<Request> MixedRequests();

}  // namespace kvasir::worker
