#include "server/runtime/admin_service.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "base/cli/version.h"
#include "base/log.h"
#include "base/net/grpc_status.h"
#include "router/base/refusal_reason.h"
#include "router/facades/calls/metadata.h"

namespace kvasir::cli {

void DrainLatch::Open() {
  base::MutexLock lock(&mutex_);
  open_ = true;
}

bool DrainLatch::open() const {
  base::MutexLock lock(&mutex_);
  return open_;
}

void DrainLatch::Request(absl::Duration deadline) {
  base::MutexLock lock(&mutex_);
  if (requested_) return;
  requested_ = true;
  deadline_ = deadline;
  changed_.SignalAll();
}

bool DrainLatch::WaitRequested(absl::Duration timeout,
                               absl::Duration* deadline) {
  base::MutexLock lock(&mutex_);
  if (!requested_) changed_.WaitWithTimeout(&mutex_, timeout);
  if (requested_) *deadline = deadline_;
  return requested_;
}

void DrainLatch::Complete(DrainOutcome outcome) {
  base::MutexLock lock(&mutex_);
  complete_ = true;
  outcome_ = outcome;
  changed_.SignalAll();
}

bool DrainLatch::WaitComplete(const std::function<bool()>& cancelled,
                              DrainOutcome* outcome) {
  base::MutexLock lock(&mutex_);
  while (!complete_) {
    if (cancelled()) return false;
    changed_.WaitWithTimeout(&mutex_, absl::Milliseconds(100));
  }
  *outcome = outcome_;
  return true;
}

AdminService::AdminService(std::string program, std::string config_toml,
                           absl::Duration default_deadline, DrainLatch* latch)
    : program_(std::move(program)),
      config_toml_(std::move(config_toml)),
      default_deadline_(default_deadline),
      latch_(latch) {}

absl::Status AdminService::Admit(const grpc::ServerContext& context,
                                 const char* call) {
  if (callers_ == nullptr) return absl::OkStatus();
  router::Caller refused;
  const auto caller = callers_->Identify(router::CredentialsOf(context),
                                         kvasir::v1::ADMIN, "", &refused);
  if (!caller.ok()) {
    const std::string reason = router::RefusalReasonOf(caller.status());
    std::optional<uint64_t> unlogged = 0;
    // Refusals of unknown callers (no label) are logged at most once a minute
    // for each reason.
    if (refused.label.empty()) unlogged = strangers_.Take(reason);
    if (unlogged.has_value()) {
      base::LogWarning(
          "admin call refused",
          {{"call", call},
           {"peer", context.peer()},
           {"tenant", refused.tenant},
           {"caller", refused.label},
           {"reason", reason},
           {"status", absl::StatusCodeToString(caller.status().code())},
           {"since_last_line", *unlogged}});
    }
    return caller.status();
  }
  base::LogInfo("admin call", {{"call", call},
                               {"peer", context.peer()},
                               {"tenant", caller->tenant},
                               {"caller", caller->label}});
  return absl::OkStatus();
}

grpc::Status AdminService::Drain(grpc::ServerContext* context,
                                 const kvasir::v1::AdminDrainRequest* request,
                                 kvasir::v1::AdminDrainResponse* response) {
  if (const absl::Status status = Admit(*context, "Drain"); !status.ok()) {
    return base::ToGrpcStatus(status);
  }
  // A process cannot drain while its model is loading.
  if (!latch_->open()) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                        "the process is not ready yet and cannot drain: "
                        "SIGTERM ends the process");
  }
  latch_->Request(request->deadline_ms() == 0
                      ? default_deadline_
                      : absl::Milliseconds(request->deadline_ms()));
  DrainOutcome outcome;
  // The drain continues even if the caller goes away.
  if (!latch_->WaitComplete([context] { return context->IsCancelled(); },
                            &outcome)) {
    return grpc::Status(grpc::StatusCode::CANCELLED,
                        "the caller is gone; the drain continues");
  }
  response->set_finished(outcome.finished);
  response->set_aborted(outcome.aborted);
  return grpc::Status::OK;
}

grpc::Status AdminService::GetConfig(grpc::ServerContext* context,
                                     const kvasir::v1::GetConfigRequest*,
                                     kvasir::v1::GetConfigResponse* response) {
  if (const absl::Status status = Admit(*context, "GetConfig"); !status.ok()) {
    return base::ToGrpcStatus(status);
  }
  response->set_program(program_);
  response->set_version(kVersion);
  response->set_config_toml(config_toml_);
  return grpc::Status::OK;
}

}  // namespace kvasir::cli
