// Carries output from the engine's thread to the transport on a thread of its
// own: serializing and sending 256 streams' tokens would cost the engine
// milliseconds a step.
#pragma once

#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::worker {

// Something with output to carry on.
class Pumped {
 public:
  virtual ~Pumped() = default;
  // Must not block.
  virtual void Advance() = 0;
};

// Owns: its thread. Shared by the streams that push into it, because the engine
// may still hold one when the service is gone.
// Threads: any thread; Stop not from Advance.
class OutputPump {
 public:
  OutputPump();
  ~OutputPump();

  // Advance() will be called soon, once for each push; never after Stop.
  void Push(std::shared_ptr<Pumped> stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Idempotent; returns when no Advance runs any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  base::Mutex mutex_;
  base::CondVar wake_;
  std::deque<std::shared_ptr<Pumped>> ready_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvasir::worker
