// A simulation of routers and replicas, event by event and without sockets or
// a model. The routers choose with the code of the product (ReplicaPicker).
//
// A replica runs prompts one after the other. A prompt takes a fixed time, and
// a time for each token whose page is not cached. Then the replica generates
// the output at a fixed rate, at any batch size. Its cache keeps the pages of
// running requests and the most recently used others. It reports its load after
// each change, but at most once in 50 ms.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/router/trace.h"
#include "router/policy/picker.h"

namespace kvasir::bench {

struct SimulationOptions {
  uint32_t replicas = 8;
  // Routers that share no state. Requests arrive at them at random.
  uint32_t routers = 1;
  uint64_t cache_pages = 16384;
  uint32_t max_num_seqs = 64;
  double prompt_tokens_per_s = 8000.0;
  double step_s = 0.005;   // what each prompt takes in addition
  double token_s = 0.025;  // a token of output
  double report_s = 0.05;  // the shortest time between two reports
  bool sessions = false;   // whether routers see the trace's sessions
  // Each request asks two random replicas, and the one with less load gets it.
  // Replaces picker.policy.
  bool two_choices = false;
  router::PickerOptions picker;
  uint64_t seed = 1;
};

struct SimulationResult {
  // The share of prompt tokens that were in the cache of the request's replica.
  double hit_rate = 0.0;
  // The number of requests at the replica with most of them over the mean:
  // the average over the requests' arrivals.
  double imbalance = 0.0;
  // The largest time that a replica spent on prompts in the whole run, over the
  // mean.
  double work_imbalance = 0.0;
  // The longest time that a replica spent on prompts, as a share of the run.
  double busiest = 0.0;
  // From arrival to the start of the prompt, and to the first token.
  double queue_s_p50 = 0.0;
  double queue_s_p99 = 0.0;
  double first_token_s_p50 = 0.0;
  double first_token_s_p99 = 0.0;
  double choices_per_s = 0.0;
};

SimulationResult Simulate(const Trace& trace, const SimulationOptions& options);

// The hit rate of one cache that never forgets and that all requests share,
// each with the pages of all requests that arrived earlier. No policy can reach
// more.
double BestHitRate(const Trace& trace);

}  // namespace kvasir::bench
