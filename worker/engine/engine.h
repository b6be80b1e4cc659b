// The worker's engine: takes requests from any thread, runs scheduler and
// executor on its own, and hands tokens to each request's sink.
//
//   auto engine = Engine::Create(options, &cache, &executor);
//   engine->Start();                       // warms up, then serves
//   Refusal refusal = engine->Submit(std::move(request), sink);
//   engine->Abort("id", std::nullopt);
//   engine->BeginDrain(); engine->WaitIdle(deadline); engine->Stop();
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"
#include "worker/engine/scheduler_options.h"
#include "worker/engine/served_engine.h"
#include "worker/engine/token_mask.h"
#include "worker/executor/executor.h"

namespace kvasir::cache {
class KvCache;
}

namespace kvasir::worker {

struct StallReport {
  absl::Duration stalled;
  // The step that hangs, one line per sequence, without token ids; or that no
  // step was planned.
  std::string plan;
};

struct EngineOptions {
  SchedulerOptions scheduler;
  // Create sets vocab_size, max_model_len, eviction and token_masks from the
  // rest, and max_n to at most max_num_seqs.
  RequestLimits limits;
  // A step takes at most so long while there is work; zero: no watchdog.
  absl::Duration watchdog = absl::Seconds(60);
  // Called once, from the watchdog's thread: turn NOT_SERVING, log, exit.
  std::function<void(const StallReport&)> on_stall;
  // Called once, from the engine's thread, when the executor failed. All
  // requests have been failed; Submit refuses from now on. Neither callback may
  // stop or destroy the engine itself.
  std::function<void(const absl::Status&)> on_failure;
  bool warm_up = true;
  const base::Clock* clock = &base::Clock::Real();
  EngineObserver* observer = nullptr;        // may be null
  TokenMaskProvider* token_masks = nullptr;  // may be null
};

// Owns: the engine's thread, the watchdog's, the queue, the scheduler.
//   `cache` and `executor` are the caller's, outlive the engine, and are the
//   engine thread's alone between Start and Stop.
// Threads: all methods from any thread; Start and Stop from one.
// Errors: refusals are values; a failed executor ends every request.
class Engine : public ServedEngine {
 public:
  // INVALID_ARGUMENT when options contradict each other or the cache is too
  // small for one sequence of max_model_len tokens. The destructor stops what
  // runs.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options,
                                                        cache::KvCache* cache,
                                                        Executor* executor);

  // Returns after the warm-up: steps at the maximum batch, prefill and decode,
  // by the same path as any request. The executor's error if that fails.
  virtual absl::Status Start() = 0;

  // Ends the thread after the step in flight; what still runs fails with
  // kDraining (its sinks hear it). Idempotent.
  virtual void Stop() = 0;

  virtual LoadSnapshot Load() const = 0;
};

}  // namespace kvasir::worker
