// The router proper: canonical requests in, replicas chosen, streams relayed.
//
//   TimerThread timers;
//   ReplicaRegistry registry(registry_options, factory, &timers, &observer);
//   KVASIR_RETURN_IF_ERROR(registry.Start(absl::Seconds(10)));
//   RouterCore router(options, {&registry, &timers, &log, &observer});
//   ... facades over &router ...
//   router.AnnounceDrain();                    // health says draining
//   router.BeginDrain();                       // and Submit refuses
//   if (!router.WaitIdle(deadline)) router.CancelAll(CancelReason::kShutdown);
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
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
#include "router/policy/policy.h"
#include "router/replicas/replica_registry.h"

namespace kvasir::router {

struct RouterCoreOptions {
  AdmissionLimits admission;
  PolicyKind policy = PolicyKind::kLeastLoaded;
  // Where a request names none.
  uint32_t default_max_tokens = 256;
  // How long a request may wait in the router's own queue where it names none.
  absl::Duration queue_timeout = absl::Seconds(30);
  // Workers asked for one request before its first token.
  int max_attempts = 3;
  uint32_t max_n = 128;
};

class ActiveRequest;

// Owns: the requests in flight.
// Threads: any thread. A request's lock and the router's are never held
//   together; no callback runs under either, but for the observer's OnInFlight
//   under the router's.
class RouterCore final : public RequestRouter {
 public:
  struct Parts {
    ReplicaRegistry* registry = nullptr;
    TimerThread* timers = nullptr;
    AccessLogSink* log = nullptr;        // may be null
    RouterObserver* observer = nullptr;  // may be null
  };

  // The parts outlive it.
  RouterCore(RouterCoreOptions options, Parts parts);
  // Cancels what still runs and waits for it. No facade uses it any more.
  ~RouterCore() override;

  absl::StatusOr<std::shared_ptr<RequestHandle>> Submit(
      CanonicalRequest request, std::shared_ptr<RequestSink> sink) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void LogRefused(CanonicalRequest request, const absl::Status& why) override;
  std::vector<ModelStatus> Models() const override;
  absl::StatusOr<ModelStatus> Model(const std::string& name) const override;
  RouterHealth Health() const override ABSL_LOCKS_EXCLUDED(mutex_);

  // Health says draining from now on, so that clients leave; they are still
  // served.
  void AnnounceDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  // As that, and Submit refuses with DRAINING; what runs goes on.
  void BeginDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Requests that have ended since the start, however they did.
  uint64_t ended() const ABSL_LOCKS_EXCLUDED(mutex_);
  // True once every request has ended (its OnDone has returned).
  bool WaitIdle(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  void CancelAll(CancelReason reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // Requests submitted and not ended.
  size_t in_flight() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class ActiveRequest;
  using ActivePtr = std::shared_ptr<ActiveRequest>;

  // Checks the request against its model and sets what it leaves open.
  absl::Status Complete(CanonicalRequest* request);
  absl::Status Refuse(CanonicalRequest request, absl::Status why);
  // Gives the request a place; UNAVAILABLE, RESOURCE_EXHAUSTED when there is
  // none.
  absl::StatusOr<Admission::Answer> Enter(const ActivePtr& active)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void WaitInQueue(const ActivePtr& active);
  // Opens a stream; an error where no replica can be asked.
  absl::Status Dispatch(const ActivePtr& active);
  // At that time, from the timer thread: takes it out of the queue and ends it
  // so; nothing if it waits no more.
  TimerThread::TimerId EndWaitingAt(absl::Time when, const ActivePtr& active,
                                    const absl::Status& status);
  void EndWaiting(const ActivePtr& active, const absl::Status& status);
  void LogEnd(const AccessRecord& record);
  // Frees the request's place and starts whoever that lets run. `ran`: it was
  // not in the queue.
  void Release(ActivePtr active, bool ran) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<ActivePtr> All() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Under the lock, so that the last numbers told are the last that were.
  void TellInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string KnownModels() const;

  const RouterCoreOptions options_;
  const Parts parts_;
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  const std::string id_prefix_;
  Ticket next_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  bool drain_announced_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<Ticket, ActivePtr> active_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
