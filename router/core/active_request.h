// A request in flight. It passes a worker's events to the state machine
// (RequestFlow) and the resulting output to the facade's sink.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "router/base/canonical.h"
#include "router/base/timer_thread.h"
#include "router/core/admission.h"
#include "router/core/observer.h"
#include "router/core/request_flow.h"
#include "router/replicas/replica.h"
#include "router/replicas/replica_registry.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

class RouterCore;

// The router's table of requests, the current attempt and the facade hold this
// object: it receives the attempt's events, and it is the facade's handle.
// Threads: its methods may be called from any thread, but a worker's events
// must come one at a time.
class ActiveRequest final : public RequestHandle,
                            public AttemptSink,
                            public std::enable_shared_from_this<ActiveRequest> {
 public:
  ActiveRequest(RouterCore* core, RequestFlow flow, Ticket ticket,
                std::vector<uint64_t> pages, std::shared_ptr<RequestSink> sink,
                RouterObserver* observer)
      : core_(core),
        ticket_(ticket),
        pages_(std::move(pages)),
        id_(flow.id()),
        observer_(observer),
        sink_(std::move(sink)),
        flow_(std::move(flow)) {}

  const std::string& id() const override { return id_; }
  void Cancel(CancelReason reason) override ABSL_LOCKS_EXCLUDED(mutex_);

  void OnEvent(const kvasir::v1::GenerateEvent& event) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAttemptDone(const absl::Status& status) override
      ABSL_LOCKS_EXCLUDED(mutex_);

  Ticket ticket() const { return ticket_; }
  // The keys of the prompt's pages (ReplicaPicker::KeysOf).
  const std::vector<uint64_t>& pages() const { return pages_; }
  const CanonicalRequest& request() const ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return flow_.request();  // no lock: the flow's request never changes
  }
  // The status with which the request ends if it was cancelled.
  std::optional<absl::Status> Cancelled() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status NoReplica(const absl::Status& otherwise) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns true if the request waits when no replica can be asked.
  bool Waits() const ABSL_LOCKS_EXCLUDED(mutex_);
  Admission::Waiting waiting() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns whether `replica` may run the request: it has not been asked in
  // this connection, and, if tokens have already been received, it has the same
  // weights, cache format and arithmetic as the replica that produced them.
  bool MayRunOn(const Replica& replica) const ABSL_LOCKS_EXCLUDED(mutex_);
  // If the replica that runs the request hangs, and another candidate may go on
  // with it, resets the attempt, which makes the request move.
  void LeaveHungReplica(const CandidateList& candidates)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts an attempt: opens a stream to `replica`.
  void Open(const std::shared_ptr<Replica>& replica)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Stores the request's queue timer. Returns a timer for the caller to cancel:
  // the previous one, or `timer` itself if the request has ended.
  std::optional<TimerThread::TimerId> SetQueueTimer(
      const TimerThread::TimerId& timer) ABSL_LOCKS_EXCLUDED(mutex_);
  std::optional<TimerThread::TimerId> TakeQueueTimer()
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the request: logs it, calls the sink's OnDone and drops the sink. Call
  // this once.
  void Close(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Marks the request as ended and returns its log record, without calling the
  // sink. Submit calls this for a request that it refuses.
  AccessRecord Discard(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool MayRun(const Replica& replica) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WorkerCall NewCall(const Replica& replica) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Passes tokens to the sink, except those that an earlier attempt
  // has delivered.
  void DeliverTokens(const kvasir::v1::GenerateEvent::Tokens& tokens,
                     const RequestFlow::Delivery& delivery);

  RouterCore* const core_;
  const Ticket ticket_;
  const std::vector<uint64_t> pages_;
  const std::string id_;
  RouterObserver* const observer_;
  // Null after Close. Needs no lock, because only one thread at a time uses it.
  std::shared_ptr<RequestSink> sink_;

  mutable base::Mutex mutex_;
  RequestFlow flow_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  // The properties of the replica that produced the first tokens.
  std::optional<kvasir::v1::WorkerInfo> begun_on_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Attempt> attempt_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<ReplicaLease> lease_ ABSL_GUARDED_BY(mutex_);
  std::optional<TimerThread::TimerId> queue_timer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
