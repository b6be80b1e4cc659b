// A thread that passes output to the transport. If the engine's thread
// serialized and sent the tokens of 256 streams itself, each step would take
// milliseconds longer.
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
  // Called on the pump's thread after each Push. Must not block.
  virtual void Advance() = 0;
};

// Calls Advance of streams, in the order in which they were pushed.
// Owns: its thread. Streams hold the pump by shared_ptr, because the engine may
//   keep a stream after the service is destroyed.
// Threads: any thread may call any method, but Advance must not call Stop.
class OutputPump {
 public:
  OutputPump();
  ~OutputPump();

  // Calls stream->Advance() soon, once for each Push, but never after Stop.
  void Push(std::shared_ptr<Pumped> stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until no Advance is running, and starts no further one. Idempotent.
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
