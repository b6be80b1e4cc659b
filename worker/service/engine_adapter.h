// The real engine behind the service.
#pragma once

#include <memory>
#include <utility>

#include "worker/engine/engine.h"
#include "worker/service/served_engine.h"

namespace kvasir::worker {

// `engine` outlives it.
class EngineAdapter final : public ServedEngine {
 public:
  explicit EngineAdapter(Engine* engine) : engine_(engine) {}

  Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) override {
    return engine_->Submit(std::move(request), std::move(sink));
  }
  int Abort(std::string_view request_id,
            std::optional<uint32_t> attempt) override {
    return engine_->Abort(request_id, attempt);
  }
  void RefuseAll(const Refusal& why) override { engine_->RefuseAll(why); }
  void BeginDrain() override { engine_->BeginDrain(); }
  bool WaitIdle(absl::Time deadline) override {
    return engine_->WaitIdle(deadline);
  }
  void SubscribeLoad(std::weak_ptr<LoadListener> listener) override {
    engine_->SubscribeLoad(std::move(listener));
  }
  Ended Totals() const override {
    const EngineTotals totals = engine_->Totals();
    return {totals.finished, totals.aborted + totals.failed};
  }

 private:
  Engine* const engine_;
};

}  // namespace kvasir::worker
