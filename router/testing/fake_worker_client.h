// A scripted WorkerClient without gRPC, for tests of code that uses workers.
// Callbacks run on the timer thread `transport` instead of gRPC's threads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "router/base/callback_gate.h"
#include "router/base/timer_thread.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

// A fake attempt, by which the test sends the worker's events.
// Threads: its methods may be called from any thread. Events reach the sink in
// the order of the calls.
class FakeAttempt final : public Attempt,
                          public std::enable_shared_from_this<FakeAttempt> {
 public:
  FakeAttempt(WorkerCall call, std::shared_ptr<AttemptSink> sink,
              TimerThread* transport);

  const WorkerCall& call() const { return call_; }
  bool started() const;
  bool cancelled() const;

  void Accept();
  void Tokens(const std::vector<int32_t>& ids, uint32_t index = 0);
  void Finish(kvasir::v1::FinishReason reason, uint32_t index = 0);
  void Send(const kvasir::v1::GenerateEvent& event);
  // Ends the attempt. Only the first call has an effect.
  void End(const absl::Status& status);

  void Start() override;
  // Makes the attempt fail as if the worker could not be reached. Call
  // before Start.
  void MakeUnreachable();
  void Cancel() override;

 private:
  void OnTransport(TimerThread::Task task);

  const WorkerCall call_;
  // Used only by the timer thread.
  std::shared_ptr<AttemptSink> sink_;
  bool ended_ = false;
  TimerThread* const transport_;
  mutable base::Mutex mutex_;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool reachable_ ABSL_GUARDED_BY(mutex_) = true;
};

class FakeWorkerClient;

// A fake worker that a test controls. It must outlive all calls to its clients.
// Threads: its methods may be called from any thread.
class FakeWorker {
 public:
  explicit FakeWorker(TimerThread* transport);
  ~FakeWorker() { gate_->Close(); }

  // The worker's properties. The test may change them before a client asks
  // for them.
  kvasir::v1::WorkerInfo* info() { return &info_; }
  void SetReachable(bool reachable);
  // Sets a function that each GetInfo calls on the thread of its caller.
  void OnInfoAsked(std::function<void()> then);
  // Sets a function that NewAttempt calls with each new attempt.
  void OnAttempt(std::function<void(const std::shared_ptr<FakeAttempt>&)> then);

  // Sends a report. Without calls, the last one is repeated as a heartbeat.
  void Report(const kvasir::v1::LoadReport& report);
  // Stops or starts the heartbeats.
  void SetSilent(bool silent);
  // Breaks the connection to the worker: ends the watch and all attempts.
  void Die();

  std::vector<std::shared_ptr<FakeAttempt>> attempts() const;
  bool watched() const;

  std::unique_ptr<WorkerClient> NewClient();

 private:
  friend class FakeWorkerClient;

  void OnTransport(TimerThread::Task task);
  void EndWatch(const FakeWorkerClient* client);
  // Sends a heartbeat, now and again.
  void Beat();

  TimerThread* const transport_;
  kvasir::v1::WorkerInfo info_;
  mutable base::Mutex mutex_;
  const std::shared_ptr<CallbackGate> gate_ = std::make_shared<CallbackGate>();
  bool reachable_ ABSL_GUARDED_BY(mutex_) = true;
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> on_info_asked_ ABSL_GUARDED_BY(mutex_);
  kvasir::v1::LoadReport report_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const std::shared_ptr<FakeAttempt>&)> on_attempt_
      ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<FakeAttempt>> attempts_ ABSL_GUARDED_BY(mutex_);
  std::map<const FakeWorkerClient*, std::shared_ptr<LoadSink>> watches_
      ABSL_GUARDED_BY(mutex_);
};

class FakeWorkerClient final : public WorkerClient {
 public:
  explicit FakeWorkerClient(FakeWorker* worker);
  ~FakeWorkerClient() override;

  std::shared_ptr<Attempt> NewAttempt(
      WorkerCall call, std::shared_ptr<AttemptSink> sink) override;
  void GetInfo(absl::Duration,
               std::function<void(absl::StatusOr<kvasir::v1::WorkerInfo>)> done)
      override;
  void WatchLoad(absl::Duration, std::shared_ptr<LoadSink> sink) override;
  void Close() override;

 private:
  FakeWorker* const worker_;
  const std::shared_ptr<CallbackGate> gate_;  // the worker's
  bool closed_ = false;                       // guarded by worker_->mutex_
};

}  // namespace kvasir::router
