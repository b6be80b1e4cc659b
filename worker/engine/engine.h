// The worker's engine. It accepts requests from any thread, runs scheduler and
// executor on a thread of its own, and passes tokens to each request's sink.
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
  // Describes the plan of the step that hangs: one line per sequence, without
  // token ids. If no step is running, the text says so.
  std::string plan;
};

struct EngineOptions {
  SchedulerOptions scheduler;
  // Create sets vocab_size, max_model_len, eviction and token_masks from the
  // other options, and limits max_n to max_num_seqs.
  RequestLimits limits;
  // The watchdog calls on_stall if no step finishes for this long while there
  // is work. Zero: no watchdog.
  absl::Duration watchdog = absl::Seconds(60);
  // Called once, from the watchdog's thread, when the engine stalls. It should
  // report NOT_SERVING, log the report and exit the process.
  std::function<void(const StallReport&)> on_stall;
  // Called once, from the engine's thread, after the executor failed. By then
  // all requests have ended, and Submit refuses new ones. Neither on_stall nor
  // on_failure may stop or destroy the engine.
  std::function<void(const absl::Status&)> on_failure;
  bool warm_up = true;
  const base::Clock* clock = &base::Clock::Real();
  EngineObserver* observer = nullptr;        // may be null
  TokenMaskProvider* token_masks = nullptr;  // may be null
};

// Owns: the engine's thread, the watchdog's thread, the queue and the
//   scheduler. The caller owns `cache` and `executor`, which must outlive the
//   engine. Between Start and Stop only the engine's thread uses them.
// Threads: one thread calls Start and Stop; any thread may call the other
//   methods.
// Errors: requests are refused by a Refusal. If the executor fails, every
//   request ends with the executor's error.
class Engine : public ServedEngine {
 public:
  // INVALID_ARGUMENT if the options contradict each other, or if the cache is
  // too small for one sequence of max_model_len tokens. The engine's destructor
  // calls Stop.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options,
                                                        cache::KvCache* cache,
                                                        Executor* executor);

  // Returns after the warm-up, which prefills and decodes the largest batch.
  // Returns the executor's error if the warm-up fails.
  virtual absl::Status Start() = 0;

  // Waits for the step in flight, then ends the engine's thread. Requests that
  // have not finished fail with DRAINING. Idempotent.
  virtual void Stop() = 0;

  virtual LoadSnapshot Load() const = 0;
};

}  // namespace kvasir::worker
