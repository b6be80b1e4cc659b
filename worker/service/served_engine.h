// What the gRPC service needs of an engine; a scripted one stands in for it in
// tests.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/time/time.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/request.h"

namespace kvasir::worker {

// The contract of each method is that of Engine (worker/engine/engine.h).
// Threads: any thread.
class ServedEngine {
 public:
  virtual ~ServedEngine() = default;
  virtual Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) = 0;
  virtual int Abort(std::string_view request_id,
                    std::optional<uint32_t> attempt) = 0;
  virtual void RefuseAll(const Refusal& why) = 0;
  virtual void BeginDrain() = 0;
  virtual bool WaitIdle(absl::Time deadline) = 0;
  virtual void SubscribeLoad(std::weak_ptr<LoadListener> listener) = 0;
  struct Ended {
    uint64_t finished = 0;
    uint64_t aborted = 0;
  };
  // Requests that ended so far.
  virtual Ended Totals() const = 0;
};

}  // namespace kvasir::worker
