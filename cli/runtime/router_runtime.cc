#include "cli/runtime/router_runtime.h"

#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "cli/version.h"
#include "router/facades/text/tokenizer_codec.h"
#include "router/policy/policy.h"
#include "router/replicas/grpc_worker_client.h"
#include "worker/engine/request.h"

namespace kvasir::cli {

absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(
    const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(absl::StrCat(
        "--model ", folder,
        std::filesystem::exists(folder, error) ? ": is no folder"
                                               : ": no such folder"));
  }
  auto tokenizer = model::Tokenizer::Load(folder);
  if (absl::IsNotFound(tokenizer.status())) return nullptr;
  KVASIR_RETURN_IF_ERROR(tokenizer.status());
  return std::shared_ptr<const model::Tokenizer>(*std::move(tokenizer));
}

absl::StatusOr<std::unique_ptr<RouterRuntime>> RouterRuntime::Create(
    RouterRuntimeOptions options) {
  auto runtime = std::unique_ptr<RouterRuntime>(new RouterRuntime());
  runtime->metrics_ = std::make_unique<router::RouterMetrics>(kVersion);
  runtime->log_ = std::make_unique<router::LogAccess>();
  runtime->timers_ = std::make_unique<router::TimerThread>();

  router::ReplicaRegistryOptions registry;
  registry.targets = options.router.workers;
  registry.served_names = options.router.served_model_names;
  if (options.tokenizer != nullptr) {
    registry.tokenizer_hash = options.tokenizer->hash();
  }
  registry.on_change = [raw = runtime.get()] { raw->TellHealth(); };
  runtime->registry_ = std::make_unique<router::ReplicaRegistry>(
      std::move(registry),
      [](const std::string& target) {
        return router::NewGrpcWorkerClient(target, {});
      },
      runtime->timers_.get(), runtime->metrics_.get());
  KVASIR_RETURN_IF_ERROR(runtime->registry_->Start(options.start_timeout));

  router::RouterCoreOptions core;
  core.admission.max_in_flight =
      static_cast<size_t>(options.router.max_inflight);
  core.admission.max_queue = static_cast<size_t>(options.router.max_queue);
  core.default_max_tokens = static_cast<uint32_t>(options.default_max_tokens);
  core.queue_timeout = options.queue_timeout;
  // The limit that is told is the one that holds.
  core.max_n = worker::RequestLimits{}.max_n;
  KVASIR_ASSIGN_OR_RETURN(core.policy,
                          router::ParsePolicy(options.router.policy));
  runtime->core_ = std::make_unique<router::RouterCore>(
      core, router::RouterCore::Parts{.registry = runtime->registry_.get(),
                                      .timers = runtime->timers_.get(),
                                      .log = runtime->log_.get(),
                                      .observer = runtime->metrics_.get()});
  int64_t max_model_len = 0;
  const std::vector<router::ModelStatus> models = runtime->core_->Models();
  for (const router::ModelStatus& model : models) {
    if (model.info.has_value()) {
      max_model_len =
          std::max(max_model_len, int64_t{model.info->max_model_len()});
    }
  }
  if (max_model_len == 0) {
    return absl::UnavailableError(
        absl::StrCat("no worker answered within ",
                     absl::FormatDuration(options.start_timeout), ": ",
                     runtime->registry_->Problems(), " (check --workers)"));
  }

  router::KserveServiceOptions kserve;
  kserve.server_version = kVersion;
  kserve.limits.default_max_tokens = core.default_max_tokens;
  kserve.limits.max_n = core.max_n;
  kserve.limits.max_waiting_bytes_per_stream =
      static_cast<size_t>(options.router.stream_buffer_bytes);
  runtime->tokenizer_ = options.tokenizer;
  if (options.tokenizer != nullptr) {
    const auto codec =
        std::make_shared<const router::TokenizerCodec>(options.tokenizer);
    for (const router::ModelStatus& model : models) {
      kserve.codecs[model.name] = codec;
    }
  }
  runtime->kserve_ = std::make_unique<router::KserveService>(
      std::move(kserve), runtime->core_.get());
  base::GrpcServerOptions server;
  server.listen = options.listen;
  server.max_receive_message_bytes = base::MaxMessageBytesFor(max_model_len);
  KVASIR_ASSIGN_OR_RETURN(
      runtime->server_,
      base::GrpcServer::Start(server, {runtime->kserve_.get()}));
  {
    base::MutexLock lock(&runtime->health_mutex_);
    runtime->health_follows_ = true;
  }
  runtime->TellHealth();
  return runtime;
}

void RouterRuntime::TellHealth() {
  base::MutexLock lock(&health_mutex_);
  if (!health_follows_) return;
  const bool ready = core_->Health().ready;
  server_->SetServing("", ready);
  server_->SetServing(router::kKserveServiceName, ready);
}

void RouterRuntime::StopServing() {
  base::MutexLock lock(&health_mutex_);
  if (!std::exchange(health_follows_, false)) return;
  server_->SetServing("", false);
  server_->SetServing(router::kKserveServiceName, false);
}

RouterRuntime::~RouterRuntime() {
  StopServing();
  if (core_ != nullptr) core_->CancelAll(router::CancelReason::kShutdown);
  if (server_ != nullptr) server_->Shutdown(absl::Now() + absl::Seconds(1));
  server_.reset();
  kserve_.reset();
  core_.reset();
  if (registry_ != nullptr) registry_->Stop();
}

std::vector<std::string> RouterRuntime::model_names() const {
  std::vector<std::string> names;
  for (const router::ModelStatus& model : core_->Models()) {
    names.push_back(model.name);
  }
  return names;
}

DrainOutcome RouterRuntime::Drain(absl::Duration deadline) {
  const absl::Time end = absl::Now() + deadline;
  StopServing();
  const size_t running = core_->in_flight();
  core_->BeginDrain();
  size_t aborted = 0;
  if (!core_->WaitIdle(end)) {
    aborted = core_->in_flight();
    core_->CancelAll(router::CancelReason::kShutdown);
    core_->WaitIdle(absl::Now() + absl::Seconds(5));
  }
  kserve_->BeginDrain();
  // Clients read what is still on its way to them.
  server_->Shutdown(absl::Now() + absl::Seconds(1));
  return {
      .finished = static_cast<uint32_t>(running - std::min(running, aborted)),
      .aborted = static_cast<uint32_t>(aborted)};
}

}  // namespace kvasir::cli
