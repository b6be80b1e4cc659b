// kvasir.v1.Admin: what an operator asks of a running process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/log_limit.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/admin.grpc.pb.h"
#include "router/identity/callers.h"

namespace kvasir::cli {

struct DrainOutcome {
  uint32_t finished = 0;
  uint32_t aborted = 0;
};

// A drain that several sources may start (Admin.Drain, SIGTERM): it runs once,
// on the main thread; everyone gets its outcome.
//
// Threads: all methods from any thread.
class DrainLatch {
 public:
  // The main thread will wait for requests from now on.
  void Open();
  bool open() const;
  // Asks for a drain. Only the first call's deadline counts.
  void Request(absl::Duration deadline);
  // Main thread: true when a drain was asked for; waits at most `timeout`.
  bool WaitRequested(absl::Duration timeout, absl::Duration* deadline);
  // Main thread: the drain is over.
  void Complete(DrainOutcome outcome);
  // Waits for Complete; false when `cancelled` says so first.
  bool WaitComplete(const std::function<bool()>& cancelled,
                    DrainOutcome* outcome);

 private:
  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  bool complete_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration deadline_ ABSL_GUARDED_BY(mutex_);
  DrainOutcome outcome_ ABSL_GUARDED_BY(mutex_);
};

// A synchronous service: calls are rare and may block.
class AdminService final : public kvasir::v1::Admin::Service {
 public:
  AdminService(std::string program, std::string config_toml,
               absl::Duration default_deadline, DrainLatch* latch);

  // From now on callers must be ADMIN of these (null: nobody is asked). Before
  // it is served.
  void Ask(std::shared_ptr<const router::Callers> callers) {
    callers_ = std::move(callers);
  }

  grpc::Status Drain(grpc::ServerContext* context,
                     const kvasir::v1::AdminDrainRequest* request,
                     kvasir::v1::AdminDrainResponse* response) override;
  grpc::Status GetConfig(grpc::ServerContext* context,
                         const kvasir::v1::GetConfigRequest* request,
                         kvasir::v1::GetConfigResponse* response) override;

 private:
  // Whether the call may be made; logs who makes it, or would: whom nobody
  // knows, once a minute for each reason.
  absl::Status Admit(const grpc::ServerContext& context, const char* call);

  const std::string program_;
  const std::string config_toml_;
  const absl::Duration default_deadline_;
  DrainLatch* const latch_;
  std::shared_ptr<const router::Callers> callers_;
  base::LogLimit strangers_;
};

}  // namespace kvasir::cli
