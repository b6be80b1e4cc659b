// The implementation of RequestRouter: it accepts requests, chooses replicas
// for them and passes the replicas' output to the sinks.
//
//   TimerThread timers;
//   ReplicaRegistry registry(registry_options, factory, &timers, &observer);
//   KVASIR_RETURN_IF_ERROR(registry.Start(absl::Seconds(10)));
//   RouterCore router(options, {&registry, &timers, &log, &observer});
//   ... facades over &router ...
//   router.AnnounceDrain();                    // health reports draining
//   router.BeginDrain();                       // and Submit refuses
//   if (!router.WaitIdle(deadline)) router.CancelAll(CancelReason::kShutdown);
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "router/base/callback_gate.h"
#include "router/base/canonical.h"
#include "router/base/timer_thread.h"
#include "router/core/access_log.h"
#include "router/core/admission.h"
#include "router/core/observer.h"
#include "router/core/request_flow.h"
#include "router/policy/picker.h"
#include "router/replicas/replica_registry.h"

namespace kvasir::router {

// Parses off, exact or rounding. Other texts are INVALID_ARGUMENT.
absl::StatusOr<MoveStreams> ParseMoveStreams(const std::string& text);

struct RouterCoreOptions {
  AdmissionLimits admission;
  // The picker's seed is drawn by the router.
  PickerOptions picker;
  // The max_tokens of requests that do not set it.
  uint32_t default_max_tokens = 256;
  // How long a request may wait in the router's queue if it sets no
  // queue timeout.
  absl::Duration queue_timeout = absl::Seconds(30);
  // How many workers may be asked, one after the other, to run a request.
  int max_attempts = 3;
  // kExact: streams of CPUs with plans that do not lift prompts go on at
  // another replica. kRounding: also other streams of one sample.
  MoveStreams move_streams = MoveStreams::kExact;
  uint32_t max_n = 128;
};

class ActiveRequest;

// The router; the example above shows how it is used.
// Owns: the requests in flight.
// Threads: its methods may be called from any thread. No thread holds a
// request's lock and the router's lock at the same time. Callbacks run
// without these locks, except the observer's OnInFlight, which runs under the
// router's lock.
class RouterCore final : public RequestRouter {
 public:
  struct Parts {
    ReplicaRegistry* registry = nullptr;
    TimerThread* timers = nullptr;
    AccessLogSink* log = nullptr;        // may be null
    RouterObserver* observer = nullptr;  // may be null
  };

  // The parts must outlive the router.
  RouterCore(RouterCoreOptions options, Parts parts);
  // Cancels running requests and waits until they have ended. From then on
  // facades must not use the router.
  ~RouterCore() override;

  absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void LogRefused(CanonicalRequest request, const absl::Status& why) override;
  std::vector<ModelStatus> Models() const override;
  absl::StatusOr<ModelStatus> Model(const std::string& name) const override;
  RouterHealth Health() const override ABSL_LOCKS_EXCLUDED(mutex_);

  // From now on Health reports that the router is draining, so that clients use
  // other routers. New requests are still served.
  void AnnounceDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Does the same as AnnounceDrain, and makes Submit refuse new requests with
  // DRAINING. Running requests continue.
  void BeginDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  // The number of requests that have ended since the start, for any reason.
  uint64_t ended() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until every request has ended (its OnDone has returned). Returns
  // false if the deadline passes first.
  bool WaitIdle(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void CancelAll(CancelReason reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // Finds workers that hang, and moves their requests to others. The router
  // calls it in every tick; a test may pass another time that has passed.
  void CheckWorkers(absl::Duration elapsed) ABSL_LOCKS_EXCLUDED(mutex_);
  // The number of requests that have been submitted and have not ended.
  size_t in_flight() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class ActiveRequest;
  using ActivePtr = std::shared_ptr<ActiveRequest>;

  // Checks the request against its model, and sets its unset fields. Returns
  // the keys of the prompt's pages for picker_.
  absl::StatusOr<std::vector<uint64_t>> Complete(CanonicalRequest* request);
  absl::Status Refuse(CanonicalRequest request, absl::Status why);
  // Enters the request into the table if Admission lets it run or wait.
  // Returns UNAVAILABLE if the router drains and RESOURCE_EXHAUSTED if its
  // queue is full.
  absl::StatusOr<Admission::Answer> Enter(const ActivePtr& active)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void WaitInQueue(const ActivePtr& active);
  void SetQueueTimer(const ActivePtr& active,
                     const Admission::Patience& patience);
  // Chooses a replica and opens a stream to it. If no replica can be asked, a
  // request that is new or has lost its worker waits until one is ready, and
  // another request gets an error.
  absl::Status Dispatch(const ActivePtr& active);
  // Dispatches a request that may run now. If this fails, ends the request.
  void DispatchAdmitted(const ActivePtr& active) ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes a running request wait for a replica; it then no longer counts as
  // running. Returns an error if too many requests wait, or in a drain, but
  // never for a request that has output.
  absl::Status WaitForReplica(const ActivePtr& active)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the waiting requests for which a replica is ready now. A request whose
  // replicas are all draining gets an error, and every waiting request gets one
  // after BeginDrain, unless it has output and keeps waiting.
  void RetryWaiting() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns true if the request need not wait for one of the candidates: one is
  // ready that may run it, or all are draining and the request has no output.
  static bool CanDispatch(const ActiveRequest& active,
                          const CandidateList& candidates);
  // Logs for each newly connected worker whether its streams may move, and
  // counts the replicas of each kind. Runs on the timer thread.
  void ReportMoves();
  // Makes the timer thread call CheckWorkers in every tick.
  void TickLater();
  // Call this after the request has entered a queue. Ends the request if it was
  // cancelled before, because Cancel could not find it in a queue then.
  void EndWaitingIfCancelled(const ActivePtr& active);
  ActivePtr Find(Ticket ticket) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the task on the timer thread, unless the router is destroyed first.
  void RunSoon(std::function<void()> task);
  // Makes the timer thread remove the request from the queue at `when` and
  // end it with `status`. Has no effect if the request no longer waits at
  // that time.
  TimerThread::TimerId EndWaitingAt(absl::Time when, const ActivePtr& active,
                                    const absl::Status& status);
  void EndWaiting(const ActivePtr& active, const absl::Status& status);
  void LogEnd(const AccessRecord& record);
  // Removes a request that has ended, and starts waiting requests in its place.
  // `ran` is false if the request ended while it waited in the queue.
  void Release(ActivePtr active, bool ran) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<ActivePtr> All() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports the numbers of requests to the observer. Call it under the lock, so
  // that the observer receives them in the order of the changes.
  void ReportInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string KnownModels() const;

  const RouterCoreOptions options_;
  const Parts parts_;
  ReplicaPicker picker_;
  // Used only by the timer thread. moves_logged_ has the last connection to
  // each worker that ReportMoves has logged.
  RunningTime running_time_;
  std::map<std::string, uint64_t> moves_logged_;
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  const std::string id_prefix_;
  Ticket next_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  bool drain_announced_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<Ticket, ActivePtr> active_ ABSL_GUARDED_BY(mutex_);
  // The requests that wait for a replica, by priority and ticket. They do not
  // count as running.
  std::map<std::pair<int32_t, Ticket>, ActivePtr> without_replica_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
