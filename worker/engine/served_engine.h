// The interface through which a server uses an engine: it submits, aborts and
// counts requests. Tests of the server implement it with a scripted engine.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/time/time.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// Counts requests that have ended since the start, without warm-up requests.
struct EngineTotals {
  uint64_t finished = 0;
  uint64_t aborted = 0;  // requests with at least one aborted sample
  uint64_t failed = 0;
};

// Threads: any thread may call any method.
class ServedEngine {
 public:
  virtual ~ServedEngine() = default;

  // Validates and queues a request. Refusals:
  //   INVALID_ARGUMENT, UNIMPLEMENTED  no reason: the request is wrong
  //   INVALID_ARGUMENT                 NEVER_FITS: the prompt is too long
  //   ALREADY_EXISTS                   no reason: id and attempt are live
  //   RESOURCE_EXHAUSTED               RETRY_ELSEWHERE: the queue is full
  //   UNAVAILABLE                      DRAINING, or RETRY_ELSEWHERE (not
  //                                    started, stopped, executor failed)
  // A refused request's sink gets no call.
  virtual Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) = 0;

  // Ends the live request with this id and attempt, or every live attempt with
  // this id if `attempt` is absent. The request's sink gets
  // OnFinished(FINISH_ABORT) for each unfinished sample, and no further token.
  // Returns how many live requests matched; 0 is not an error. Takes one lock
  // and one hash look-up.
  virtual int Abort(std::string_view request_id,
                    std::optional<uint32_t> attempt) = 0;
  // Ends every request: calls OnFailed(why) of its sink.
  virtual void RefuseAll(const Refusal& why) = 0;

  // Submit refuses with DRAINING from now on. Accepted requests still run.
  virtual void BeginDrain() = 0;
  // Waits until no request is live and returns true, or returns false at the
  // deadline.
  virtual bool WaitIdle(absl::Time deadline) = 0;

  // Reports the load to `listener` until the listener is destroyed: once soon
  // after this call, then after every step or event that changed the load.
  virtual void SubscribeLoad(std::weak_ptr<LoadListener> listener) = 0;

  virtual EngineTotals Totals() const = 0;
};

}  // namespace kvasir::worker
