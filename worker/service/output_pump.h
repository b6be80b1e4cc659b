// Passes output to the transport on a thread of its own. On the engine's
// thread, serializing and sending the tokens of 256 streams would take
// milliseconds in each step.
#pragma once

#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::worker {

// A stream that has output to send.
class Pumped {
 public:
  virtual ~Pumped() = default;
  // Must not block.
  virtual void Advance() = 0;
};

// Owns: its thread. The streams share the pump, because the engine may hold a
//   stream after the service is destroyed.
// Threads: any thread. Stop must not be called from Advance.
class OutputPump {
 public:
  OutputPump();
  ~OutputPump();

  // Calls Advance() soon, once for each Push, but never after Stop.
  void Push(std::shared_ptr<Pumped> stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns when no Advance runs any more. Idempotent.
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
