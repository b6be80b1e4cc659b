// Implements kvasir.v1.Admin, by which operators control a running process.
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

// Passes requests to drain (Admin.Drain, SIGTERM) to the main thread. The drain
// runs once, and all callers get its outcome.
//
// Threads: all methods may be called from any thread.
class DrainLatch {
 public:
  // Called by the main thread before WaitRequested, when the process is able
  // to drain.
  void Open();
  bool open() const;
  // Requests a drain. Only the first call's deadline counts.
  void Request(absl::Duration deadline);
  // Called by the main thread: waits at most `timeout` for a request. Returns
  // true if a drain was requested.
  bool WaitRequested(absl::Duration timeout, absl::Duration* deadline);
  // Called by the main thread when the drain is over.
  void Complete(DrainOutcome outcome);
  // Waits for Complete; returns false if `cancelled` returns true first.
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

// The service. It is synchronous, because calls are rare and may block.
class AdminService final : public kvasir::v1::Admin::Service {
 public:
  AdminService(std::string program, std::string config_toml,
               absl::Duration default_deadline, DrainLatch* latch);

  // Accepts only the callers in `callers` that have the role ADMIN. If
  // `callers` is null, callers need no credentials. Call it before the service
  // is registered.
  void RequireCallers(std::shared_ptr<const router::Callers> callers) {
    callers_ = std::move(callers);
  }

  grpc::Status Drain(grpc::ServerContext* context,
                     const kvasir::v1::AdminDrainRequest* request,
                     kvasir::v1::AdminDrainResponse* response) override;
  grpc::Status GetConfig(grpc::ServerContext* context,
                         const kvasir::v1::GetConfigRequest* request,
                         kvasir::v1::GetConfigResponse* response) override;

 private:
  // Checks whether the caller may make the call `call`, and logs the
  // result. Refusals of unknown callers are logged at most once a minute
  // for each reason.
  absl::Status Admit(const grpc::ServerContext& context, const char* call);

  const std::string program_;
  const std::string config_toml_;
  const absl::Duration default_deadline_;
  DrainLatch* const latch_;
  std::shared_ptr<const router::Callers> callers_;
  base::LogLimit strangers_;
};

}  // namespace kvasir::cli
