// What a server needs of an engine: requests come, end, and are counted. A
// scripted one stands in for the real one in tests.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/time/time.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// Requests that ended since the start (warm-up not counted).
struct EngineTotals {
  uint64_t finished = 0;
  uint64_t aborted = 0;  // at least one sample
  uint64_t failed = 0;
};

// Threads: any thread.
class ServedEngine {
 public:
  virtual ~ServedEngine() = default;

  // Validates and queues. Refusals:
  //   INVALID_ARGUMENT, UNIMPLEMENTED      kNone
  //   INVALID_ARGUMENT                     kNeverFits (prompt too long)
  //   ALREADY_EXISTS                       kNone (id and attempt are live)
  //   RESOURCE_EXHAUSTED                   kRetryElsewhere (queue full)
  //   UNAVAILABLE                          kDraining, or kRetryElsewhere (not
  //                                        started, stopped, executor failed)
  // On a refusal the sink hears nothing.
  virtual Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) = 0;

  // Ends a request in whatever state it is; the sink hears OnFinished(kAbort)
  // for each unfinished sample, and no token after that. Ids match exactly;
  // without `attempt`, every attempt. Returns how many live requests matched:
  // 0 is no error. Costs one lock and one hash look-up.
  virtual int Abort(std::string_view request_id,
                    std::optional<uint32_t> attempt) = 0;
  // Ends every request; their sinks hear OnFailed(why).
  virtual void RefuseAll(const Refusal& why) = 0;

  // Submit refuses with kDraining from now on; what is queued still runs.
  virtual void BeginDrain() = 0;
  // True once no request is live; false at the deadline.
  virtual bool WaitIdle(absl::Time deadline) = 0;

  // `listener` hears the load soon, and then after every step or event that
  // changed it, until it is destroyed.
  virtual void SubscribeLoad(std::weak_ptr<LoadListener> listener) = 0;

  virtual EngineTotals Totals() const = 0;
};

}  // namespace kvasir::worker
