// The gRPC reactors of WorkerService's streaming calls: Generate and WatchLoad.
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

// One Generate call. It passes events from the engine and from gRPC to a
// GenerateStream and carries out the stream's actions, on one thread at a time.
//
// gRPC (until OnDone), the engine (as the request's sink) and the pump hold it
// by shared_ptr, so it may outlive the call. It uses `context` only to carry
// out actions, and the stream returns no action that needs `context` after the
// call's end.
//
// Threads: any thread may call any method.
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

  // Returns a reactor that also holds a reference to itself until OnDone.
  static std::shared_ptr<GenerateReactor> Make(Parts parts);

  // Passes the result of Engine::Submit, or the reason why Submit was not
  // called.
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
  // Makes the pump's thread call Advance soon. For calls from the engine's
  // thread, which must not block.
  void AdvanceLater();
  void Execute(StreamAction action);
  void End(const Refusal& end);

  const Parts parts_;
  // The event that is being written. Only the thread that runs Advance uses it.
  kvasir::v1::GenerateEvent writing_;

  base::Mutex mutex_;
  GenerateStream stream_ ABSL_GUARDED_BY(mutex_);
  bool advancing_ ABSL_GUARDED_BY(mutex_) = false;
  bool pushed_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<GenerateReactor> self_ ABSL_GUARDED_BY(mutex_);
};

// One WatchLoad call. It has one write in flight at a time; a report that
// arrives during a write replaces an older one that still waits.
// Threads: any thread may call any method.
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
  // Starts the next write or ends the call, unless a write is in flight.
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
