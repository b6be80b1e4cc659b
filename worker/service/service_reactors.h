// The streaming reactors behind WorkerService.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "worker/engine/served_engine.h"
#include "worker/service/generate_stream.h"
#include "worker/service/load_publisher.h"
#include "worker/service/output_pump.h"

namespace kvasir::worker {

// One Generate call: hands events of engine and transport to a GenerateStream
// and carries out its actions, one thread at a time.
//
// Lives until gRPC (OnDone), the engine (its sink) and the pump have let go, in
// any order: hence shared. `context` is touched by actions only, and the stream
// gives none that needs it after the call's end.
// Threads: any thread.
class GenerateReactor final
    : public grpc::ServerWriteReactor<kvasir::v1::GenerateEvent>,
      public EngineSink,
      public Pumped,
      public std::enable_shared_from_this<GenerateReactor> {
 public:
  struct Parts {
    grpc::CallbackServerContext* context = nullptr;
    ServedEngine* engine = nullptr;
    std::shared_ptr<OutputPump> pump;
    size_t max_queued_bytes = 0;
    std::string request_id;
    uint32_t attempt = 0;
  };

  // Keeps itself alive until OnDone.
  static std::shared_ptr<GenerateReactor> Make(Parts parts);

  // The answer of Engine::Submit, or why it was not asked.
  void OnSubmitted(const Refusal& refusal);

  void OnAccepted(uint32_t prompt_tokens) override;
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) override;
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                  bool last) override;
  void OnFailed(const Refusal& why) override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Advance() override;

 private:
  explicit GenerateReactor(Parts parts);
  // From the engine's thread: let the pump advance.
  void AdvanceLater();
  void Execute(StreamAction action);
  void End(const Refusal& end);

  const Parts parts_;
  // The event in flight; touched by the thread that advances only.
  kvasir::v1::GenerateEvent writing_;

  base::Mutex mutex_;
  GenerateStream stream_ ABSL_GUARDED_BY(mutex_);
  bool advancing_ ABSL_GUARDED_BY(mutex_) = false;
  bool pushed_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<GenerateReactor> self_ ABSL_GUARDED_BY(mutex_);
};

// One WatchLoad call: the newest report, one write at a time.
// Threads: any thread.
class WatchLoadReactor final
    : public grpc::ServerWriteReactor<kvasir::v1::LoadReport>,
      public LoadWatcher {
 public:
  static std::shared_ptr<WatchLoadReactor> Make();

  void OnReport(const LoadSnapshot& load) override;
  void OnClosed() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  WatchLoadReactor() = default;
  // Starts what may be started now.
  void Advance();

  base::Mutex mutex_;
  std::optional<kvasir::v1::LoadReport> next_ ABSL_GUARDED_BY(mutex_);
  kvasir::v1::LoadReport writing_report_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<WatchLoadReactor> self_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
