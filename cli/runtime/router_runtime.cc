#include "cli/runtime/router_runtime.h"

#include <arpa/inet.h>
#include <malloc.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "cli/version.h"
#include "router/facades/calls/replies.h"
#include "router/facades/text/tokenizer_codec.h"
#include "router/policy/policy.h"
#include "router/replicas/grpc_worker_client.h"
#include "worker/engine/request.h"

namespace kvasir::cli {

// Shared with a thread that nobody joins.
struct NameCheck {
  base::Mutex mutex;
  bool stopped ABSL_GUARDED_BY(mutex) = false;
};

namespace {

// From a client's GOAWAY to its last call on that connection.
constexpr absl::Duration kToHear = absl::Milliseconds(500);
// Clients that neither wait for an answer nor have asked for so long are not
// waited for.
constexpr absl::Duration kSilence = absl::Milliseconds(200);

// Large texts and prompts come and go. glibc's own threshold, but fixed: it
// would learn from the first ones to keep such memory, and half of a storm of
// them would stay resident.
void ReturnWhatIsFreed() { mallopt(M_MMAP_THRESHOLD, 128 << 10); }

// A name of several pods is one worker here, and which of them is the
// transport's choice: their load would be taken for one's. The resolver may
// take its time, which nobody waits for: neither a start nor an end.
void WarnOfNamesOfMany(std::vector<std::string> workers,
                       std::shared_ptr<NameCheck> check) {
  std::thread([workers = std::move(workers), check = std::move(check)] {
    for (const std::string& worker : workers) {
      if (absl::StartsWith(worker, "unix:")) continue;
      const std::string host = worker.substr(0, worker.rfind(':'));
      const int addresses = base::CountAddresses(host);
      // Held through the line: behind Stop there is none, and what a line needs
      // may be gone.
      base::MutexLock lock(&check->mutex);
      if (check->stopped) return;
      if (addresses <= 1) continue;
      base::LogWarning("a worker of several addresses is taken for one",
                       {{"worker", worker},
                        {"addresses", addresses},
                        {"want", "a name for each in --workers"}});
    }
  }).detach();
}

// "auto": where only this machine's programs ask.
bool IsOn(const std::string& flag, const base::ListenAddress& listen) {
  return flag == "on" || (flag == "auto" && base::IsLocal(listen));
}

}  // namespace

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
  ReturnWhatIsFreed();
  auto runtime = std::unique_ptr<RouterRuntime>(new RouterRuntime());
  runtime->on_health_ = std::move(options.on_health);
  runtime->max_connection_age_ = options.max_connection_age;
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
      [credentials = options.worker_credentials,
       in_process = options.workers_in_process](const std::string& target) {
        router::GrpcWorkerClientOptions client;
        client.credentials = credentials;
        if (in_process) client.keepalive_time = absl::InfiniteDuration();
        return router::NewGrpcWorkerClient(target, client);
      },
      runtime->timers_.get(), runtime->metrics_.get());
  WarnOfNamesOfMany(options.router.workers, runtime->name_check_);
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
  router::VllmEngineServiceOptions vllm_engine;
  vllm_engine.limits = kserve.limits;
  if (options.tokenizer != nullptr) {
    vllm_engine.tokenizer_folder = options.tokenizer_folder;
  }
  vllm_engine.shares_tokenizer =
      IsOn(options.router.share_tokenizer, options.listen);
  runtime->tokenizer_ = options.tokenizer;
  if (options.tokenizer != nullptr) {
    const auto codec =
        std::make_shared<const router::TokenizerCodec>(options.tokenizer);
    for (const router::ModelStatus& model : models) {
      kserve.codecs[model.name] = codec;
    }
  }
  kserve.calls = runtime->calls_;
  kserve.callers = options.callers;
  kserve.budget = std::make_shared<router::ByteBudget>(
      static_cast<size_t>(options.router.request_bytes));
  static_cast<router::FacadeOptions&>(vllm_engine) = kserve;
  router::VllmInferenceServiceOptions vllm_inference;
  static_cast<router::FacadeOptions&>(vllm_inference) = kserve;
  vllm_inference.limits = kserve.limits;
  runtime->kserve_ = std::make_unique<router::KserveService>(
      std::move(kserve), runtime->core_.get());
  runtime->vllm_engine_ = std::make_unique<router::VllmEngineService>(
      std::move(vllm_engine), runtime->core_.get());
  runtime->vllm_inference_ = std::make_unique<router::VllmInferenceService>(
      std::move(vllm_inference), runtime->core_.get());
  runtime->vllm_control_ = std::make_unique<router::VllmControlService>(
      runtime->vllm_inference_->backend(), kVersion);
  base::GrpcServerOptions server;
  server.listen = options.listen;
  server.credentials = options.credentials;
  server.explain_garbage = true;
  server.on_garbage = [kserve = runtime->kserve_->backend(),
                       engine = runtime->vllm_engine_->backend(),
                       inference = runtime->vllm_inference_->backend()](
                          const std::string& method,
                          const grpc::ServerContextBase& context) {
    if (absl::StrContains(method, router::kKserveServiceName)) {
      return router::RefuseGarbage(context, *kserve);
    }
    if (absl::StrContains(method, router::kVllmEngineServiceName)) {
      return router::RefuseGarbage(context, *engine);
    }
    return router::RefuseGarbage(context, *inference);
  };
  server.max_receive_message_bytes = base::MaxMessageBytesFor(max_model_len);
  server.max_connections = static_cast<size_t>(options.max_connections);
  server.max_connection_age = options.max_connection_age;
  // It asks nobody who he is.
  server.reflection = options.callers == nullptr
                          ? IsOn(options.router.reflection, options.listen)
                          : options.router.reflection == "on";
  KVASIR_ASSIGN_OR_RETURN(
      runtime->server_,
      base::GrpcServer::Start(
          server,
          {runtime->kserve_.get(), runtime->vllm_engine_.get(),
           runtime->vllm_inference_.get(), runtime->vllm_control_.get()}));
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
  Tell(core_->Health().ready);
}

void RouterRuntime::Tell(bool serving) {
  for (const char* service :
       {"", router::kKserveServiceName, router::kVllmEngineServiceName,
        router::kVllmInferenceServiceName, router::kVllmControlServiceName}) {
    server_->SetServing(service, serving);
  }
  if (on_health_) on_health_(serving);
}

void RouterRuntime::StopServing() {
  base::MutexLock lock(&health_mutex_);
  if (std::exchange(health_follows_, false)) Tell(false);
}

RouterRuntime::RouterRuntime() : name_check_(std::make_shared<NameCheck>()) {}

RouterRuntime::~RouterRuntime() {
  {
    base::MutexLock lock(&name_check_->mutex);
    name_check_->stopped = true;
  }
  StopServing();
  if (core_ != nullptr) core_->CancelAll(router::CancelReason::kShutdown);
  if (server_ != nullptr) server_->Shutdown(absl::Now() + absl::Seconds(1));
  server_.reset();
  vllm_control_.reset();
  vllm_inference_.reset();
  vllm_engine_.reset();
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

// gRPC tells a connection to go (GOAWAY) at its age, give or take a tenth, and
// clients go without losing a call, in flight or new. Until then they are
// served: to refuse them would lose them calls that they have no reason to try
// elsewhere.
void RouterRuntime::WaitForClientsToLeave(absl::Duration patience) {
  const base::Clock& clock = base::Clock::Real();
  const absl::Time start = clock.Now();
  const absl::Duration most =
      std::min(1.1 * max_connection_age_ + kToHear, 0.6 * patience);
  while (clock.Now() - start < most && server_->connections() > 0) {
    if (clock.Now() - start >= kSilence && calls_->QuietFor(kSilence)) return;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

DrainOutcome RouterRuntime::Drain(absl::Duration deadline) {
  const base::Clock& clock = base::Clock::Real();
  const absl::Time end = clock.Now() + deadline;
  StopServing();
  core_->AnnounceDrain();
  server_->StopListening();
  kserve_->BeginDrain();
  const uint64_t ended_before = core_->ended();
  WaitForClientsToLeave(deadline);
  core_->BeginDrain();
  kserve_->EndStreams();
  size_t aborted = 0;
  if (!core_->WaitIdle(end)) {
    aborted = core_->in_flight();
    core_->CancelAll(router::CancelReason::kShutdown);
    core_->WaitIdle(clock.Now() + absl::Seconds(5));
  }
  // Answers are still on their way, and refusals of who came late.
  const absl::Time read = std::max(end, clock.Now() + absl::Seconds(1));
  while (calls_->open() > 0 && clock.Now() < read) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  server_->Shutdown(absl::Now() + absl::Seconds(1), /*hang_up=*/true);
  // Whatever becomes of the workers now is no loss.
  registry_->Stop();
  const uint64_t ended = core_->ended() - ended_before;
  return {.finished =
              static_cast<uint32_t>(ended - std::min<uint64_t>(ended, aborted)),
          .aborted = static_cast<uint32_t>(aborted)};
}

}  // namespace kvasir::cli
