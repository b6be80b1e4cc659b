#include "server/runtime/router_runtime.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cli/version.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "model/gguf/gguf_header.h"
#include "model/shapes/config.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "router/facades/text/tokenizer_bundle.h"
#include "router/facades/text/tokenizer_codec.h"
#include "router/policy/policy.h"
#include "router/replicas/grpc_worker_client.h"
#include "worker/engine/request.h"

namespace kvasir::cli {

// State that the router shares with the detached thread of
// WarnOfSeveralAddresses.
struct NameCheck {
  base::Mutex mutex;
  bool stopped ABSL_GUARDED_BY(mutex) = false;
};

namespace {

// After gRPC has sent GOAWAY on a connection, a client may still begin calls on
// it for this time.
constexpr absl::Duration kGoAwayDelay = absl::Milliseconds(500);
// If no call runs and none has begun for this time, the drain does not wait for
// clients to leave.
constexpr absl::Duration kSilence = absl::Milliseconds(200);
// While no replica can answer, the log says so at this interval.
constexpr absl::Duration kReportInterval = absl::Seconds(10);
// The limit of messages is that of a model of this length if no worker is known
// yet. Requests that are too long for their model are refused in any case.
constexpr int64_t kLongestModel = 1 << 20;
// The most samples of a request: the workers' own limit.
constexpr uint32_t kMaxSamples = worker::RequestLimits{}.max_n;

// Sets glibc's mmap threshold to its default, so that glibc does not raise
// it. Memory blocks above the threshold go back to the system when they are
// freed. With a raised one, about half of the memory of large prompts would
// stay resident.
void ReturnFreedMemory() { mallopt(M_MMAP_THRESHOLD, 128 << 10); }

// TrimWhenSilent looks at the process's memory at this interval.
constexpr absl::Duration kTrimInterval = absl::Seconds(5);
// TrimWhenSilent calls malloc_trim if the process's resident memory, or the
// free memory in its heap, has grown by more than this.
constexpr size_t kTrimBytes = 4 << 20;

size_t ResidentBytes() {
  size_t total_pages = 0;
  size_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> total_pages >> resident_pages;
  return resident_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

struct HeapUse {
  size_t resident;
  size_t free;  // in glibc's arenas, whether resident or not

  static HeapUse Now() { return {ResidentBytes(), mallinfo2().fordblks}; }
};

// Gives freed memory back to the system when clients have been silent for a
// while. Otherwise glibc's arenas would keep it for ever after a flood of small
// messages, resets or handshakes. `least` has the least values since the last
// call of malloc_trim. It includes the free bytes, because the resident bytes
// do not change if memory is freed that was in use at that call.
void TrimWhenSilent(router::TimerThread* timers,
                    std::shared_ptr<router::ClientCalls> calls, HeapUse least) {
  timers->At(base::Clock::Real().Now() + kTrimInterval,
             [timers, calls, least]() {
               const HeapUse now = HeapUse::Now();
               if (calls->QuietFor(kTrimInterval) &&
                   (now.resident > least.resident + kTrimBytes ||
                    now.free > least.free + kTrimBytes)) {
                 malloc_trim(0);
                 TrimWhenSilent(timers, calls, HeapUse::Now());
                 return;
               }
               TrimWhenSilent(timers, calls,
                              {std::min(least.resident, now.resident),
                               std::min(least.free, now.free)});
             });
}

// Logs a warning for each worker name with several addresses. The router treats
// such a name as one worker, but gRPC may connect to any of the addresses, so
// load reports of several workers would be mixed. Uses a detached thread, so
// that a slow resolver delays neither start nor end.
void WarnOfSeveralAddresses(std::vector<router::WorkerAddress> workers,
                            std::shared_ptr<NameCheck> check) {
  std::thread([workers = std::move(workers), check = std::move(check)] {
    for (const auto& [worker, unused] : workers) {
      if (absl::StartsWith(worker, "unix:")) continue;
      const std::string host = worker.substr(0, worker.rfind(':'));
      const int addresses = base::CountAddresses(host);
      // Log while the mutex is held, because the log may be gone as soon as
      // `stopped` is set.
      base::MutexLock lock(&check->mutex);
      if (check->stopped) return;
      if (addresses <= 1) continue;
      base::LogWarning(
          "a worker name has several addresses and counts as one "
          "worker",
          {{"worker", worker},
           {"addresses", addresses},
           {"want", absl::StrCat("dns:///", worker)}});
    }
  }).detach();
}

// Returns whether a feature is on. Its flag is "on", "off" or "auto". "auto"
// means on if only programs on this machine can connect.
bool IsOn(const std::string& flag, const base::ListenAddress& listen) {
  return flag == "on" || (flag == "auto" && base::IsLocal(listen));
}

// Returns the tokenizer files that a Hugging Face folder of this GGUF file's
// model would have.
absl::StatusOr<router::NamedFiles> FilesOfGguf(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const model::GgufHeader header,
                          model::GgufHeader::Open(path));
  KVASIR_ASSIGN_OR_RETURN(const model::GgufTokenizer tokenizer,
                          model::TokenizerOfGguf(header));
  router::NamedFiles files = {{"tokenizer.json", tokenizer.tokenizer_json},
                              {"tokenizer_config.json", tokenizer.config_json}};
  KVASIR_ASSIGN_OR_RETURN(files["config.json"], model::LoadConfigText(path));
  return files;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Tokenizer>> LoadTokenizer(
    const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error) &&
      !std::filesystem::is_regular_file(folder, error)) {
    return absl::NotFoundError(
        absl::StrCat("--model ", folder,
                     std::filesystem::exists(folder, error)
                         ? " is neither a folder nor a GGUF file"
                         : " does not exist"));
  }
  auto tokenizer = model::Tokenizer::Load(folder);
  if (absl::IsNotFound(tokenizer.status())) return nullptr;
  KVASIR_RETURN_IF_ERROR(tokenizer.status());
  return std::shared_ptr<const model::Tokenizer>(*std::move(tokenizer));
}

absl::StatusOr<std::unique_ptr<RouterRuntime>> RouterRuntime::Create(
    RouterRuntimeOptions options) {
  ReturnFreedMemory();
  auto runtime = std::unique_ptr<RouterRuntime>(new RouterRuntime());
  runtime->on_health_ = std::move(options.on_health);
  runtime->max_connection_age_ = options.max_connection_age;
  runtime->tokenizer_ = options.tokenizer;
  runtime->metrics_ = std::make_unique<router::RouterMetrics>(kVersion);
  runtime->log_ = std::make_unique<router::LogAccess>();
  runtime->timers_ = std::make_unique<router::TimerThread>();
  KVASIR_RETURN_IF_ERROR(runtime->ConnectReplicas(options));
  KVASIR_RETURN_IF_ERROR(runtime->MakeCore(options));
  const int64_t max_model_len = runtime->LongestModel();
  if (max_model_len == 0 && options.workers_in_process) {
    return absl::UnavailableError(
        absl::StrCat("the worker of this process did not answer within ",
                     absl::FormatDuration(options.start_timeout), ": ",
                     runtime->registry_->Problems()));
  }
  runtime->facades_ = router::NewFacades(runtime->OptionsOfFacades(options),
                                         runtime->core_.get());
  KVASIR_RETURN_IF_ERROR(runtime->Listen(
      options, max_model_len > 0 ? max_model_len : kLongestModel));
  {
    base::MutexLock lock(&runtime->health_mutex_);
    runtime->health_follows_ = true;
  }
  runtime->UpdateHealth();
  TrimWhenSilent(runtime->timers_.get(), runtime->calls_, HeapUse::Now());
  return runtime;
}

absl::Status RouterRuntime::ConnectReplicas(
    const RouterRuntimeOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(router::WorkerList list,
                          router::ParseWorkers(options.router.workers));
  router::ReplicaRegistryOptions registry;
  registry.workers = list.fixed;
  // A worker that is found later may belong to a rolling update, and must not
  // keep a router from starting.
  registry.refusal_fails_start = list.sources.empty();
  registry.served_names = options.router.served_model_names;
  if (tokenizer_ != nullptr) registry.tokenizer_hash = tokenizer_->hash();
  registry.on_change = [this] { UpdateHealth(); };
  registry_ = std::make_unique<router::ReplicaRegistry>(
      std::move(registry),
      [credentials = options.worker_credentials,
       in_process =
           options.workers_in_process](const router::WorkerAddress& worker) {
        router::GrpcWorkerClientOptions client;
        client.credentials = credentials;
        if (in_process) client.keepalive_time = absl::InfiniteDuration();
        return router::NewGrpcWorkerClient(worker, client);
      },
      timers_.get(), metrics_.get());
  WarnOfSeveralAddresses(list.fixed, name_check_);
  ReportMissingWorkersLater();
  const absl::Time deadline = base::Clock::Real().Now() + options.start_timeout;
  if (!list.sources.empty()) {
    discovery_ = std::make_unique<router::Discovery>(
        std::move(list),
        router::Discovery::Options{
            .refresh = options.router.workers_refresh,
            .apply =
                [this](const std::vector<router::WorkerAddress>& workers,
                       const std::string& problems) {
                  registry_->SetWorkers(workers, problems);
                },
            .alive =
                [this](const std::string& target) {
                  return registry_->IsConnected(target);
                }},
        timers_.get());
    discovery_->Start(options.start_timeout);
  }
  return registry_->Start(deadline - base::Clock::Real().Now());
}

absl::Status RouterRuntime::MakeCore(const RouterRuntimeOptions& options) {
  router::RouterCoreOptions core;
  core.admission.max_in_flight =
      static_cast<size_t>(options.router.max_inflight);
  core.admission.max_queue = static_cast<size_t>(options.router.max_queue);
  core.default_max_tokens = static_cast<uint32_t>(options.default_max_tokens);
  core.queue_timeout = options.queue_timeout;
  core.max_n = kMaxSamples;
  KVASIR_ASSIGN_OR_RETURN(core.picker.policy,
                          router::ParsePolicy(options.router.policy));
  // One worker needs no choice. In a list that may grow, prompts are remembered
  // for the second one.
  KVASIR_ASSIGN_OR_RETURN(const router::WorkerList list,
                          router::ParseWorkers(options.router.workers));
  if (list.sources.empty() && list.fixed.size() == 1) {
    core.picker.policy = router::PolicyKind::kLeastLoaded;
  }
  core.picker.load_factor = options.router.load_factor;
  core.picker.prefix_bytes = static_cast<size_t>(options.router.prefix_bytes);
  KVASIR_ASSIGN_OR_RETURN(
      core.move_streams, router::ParseMoveStreams(options.router.move_streams));
  core_ = std::make_unique<router::RouterCore>(
      core, router::RouterCore::Parts{.registry = registry_.get(),
                                      .timers = timers_.get(),
                                      .log = log_.get(),
                                      .observer = metrics_.get()});
  return absl::OkStatus();
}

void RouterRuntime::ReportMissingWorkersLater() {
  timers_->At(base::Clock::Real().Now() + kReportInterval,
              [this, gate = report_gate_] {
                if (!gate->Enter()) return;
                bool ready = false;
                for (const router::ModelStatus& model : registry_->Models()) {
                  ready |= model.ready;
                }
                if (!ready) {
                  base::LogWarning("not ready: no worker can answer",
                                   {{"workers", registry_->Problems()}});
                }
                ReportMissingWorkersLater();
                gate->Leave();
              });
}

int64_t RouterRuntime::LongestModel() const {
  int64_t longest = 0;
  for (const router::ModelStatus& model : core_->Models()) {
    if (model.info.has_value()) {
      longest = std::max(longest, int64_t{model.info->max_model_len()});
    }
  }
  return longest;
}

router::FacadeOptions RouterRuntime::OptionsOfFacades(
    const RouterRuntimeOptions& options) const {
  router::FacadeOptions facade;
  facade.server_version = kVersion;
  facade.limits.default_max_tokens =
      static_cast<uint32_t>(options.default_max_tokens);
  facade.limits.max_n = kMaxSamples;
  facade.limits.max_waiting_bytes_per_stream =
      static_cast<size_t>(options.router.stream_buffer_bytes);
  facade.share_tokenizer = IsOn(options.router.share_tokenizer, options.listen);
  if (tokenizer_ != nullptr) {
    facade.tokenizer_folder = options.tokenizer_folder;
    if (model::MayBeGguf(options.tokenizer_folder) &&
        std::filesystem::path(options.tokenizer_folder).extension() !=
            ".json") {
      facade.make_tokenizer_files = [path = options.tokenizer_folder] {
        return FilesOfGguf(path);
      };
    }
    facade.codec = std::make_shared<const router::TokenizerCodec>(tokenizer_);
  }
  facade.calls = calls_;
  facade.callers = options.callers;
  facade.budget = std::make_shared<router::ByteBudget>(
      static_cast<size_t>(options.router.request_bytes));
  return facade;
}

absl::Status RouterRuntime::Listen(const RouterRuntimeOptions& options,
                                   int64_t max_model_len) {
  base::GrpcServerOptions server;
  server.listen = options.listen;
  server.credentials = options.credentials;
  server.explain_garbage = true;
  server.on_garbage = [this](const std::string& method,
                             const grpc::ServerContextBase& context) {
    const router::Facade* facade = router::FacadeOfMethod(facades_, method);
    return facade == nullptr ? absl::OkStatus()
                             : facade->RefuseGarbage(context);
  };
  server.max_receive_message_bytes = base::MaxMessageBytesFor(max_model_len);
  server.max_connections = static_cast<size_t>(options.max_connections);
  server.max_connection_age = options.max_connection_age;
  // If credentials are required, "auto" means off, because gRPC does not check
  // them for reflection calls.
  server.reflection = options.callers == nullptr
                          ? IsOn(options.router.reflection, options.listen)
                          : options.router.reflection == "on";
  KVASIR_ASSIGN_OR_RETURN(
      server_, base::GrpcServer::Start(server, router::ServicesOf(facades_)));
  return absl::OkStatus();
}

void RouterRuntime::UpdateHealth() {
  base::MutexLock lock(&health_mutex_);
  if (!health_follows_) return;
  SetServing(core_->Health().ready);
}

void RouterRuntime::SetServing(bool serving) {
  server_->SetServing("", serving);
  for (const std::string& service : router::ServiceNamesOf(facades_)) {
    server_->SetServing(service, serving);
  }
  if (on_health_) on_health_(serving);
}

void RouterRuntime::StopServing() {
  base::MutexLock lock(&health_mutex_);
  if (std::exchange(health_follows_, false)) SetServing(false);
}

RouterRuntime::RouterRuntime() : name_check_(std::make_shared<NameCheck>()) {}

RouterRuntime::~RouterRuntime() {
  report_gate_->Close();
  discovery_.reset();
  {
    base::MutexLock lock(&name_check_->mutex);
    name_check_->stopped = true;
  }
  StopServing();
  if (core_ != nullptr) core_->CancelAll(router::CancelReason::kShutdown);
  if (server_ != nullptr) server_->Shutdown(absl::Now() + absl::Seconds(1));
  server_.reset();
  facades_.clear();
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

std::string RouterRuntime::model_name() const {
  const std::vector<std::string> names = model_names();
  return names.empty() ? "" : names.front();
}

// Waits until clients have left. gRPC sends GOAWAY to a client when its
// connection reaches max_connection_age_ (plus or minus a tenth). Until then
// clients are served, because they would not retry a refused call elsewhere.
void RouterRuntime::WaitForClientsToLeave(absl::Duration patience) {
  const base::Clock& clock = base::Clock::Real();
  const absl::Time start = clock.Now();
  const absl::Duration most =
      std::min(1.1 * max_connection_age_ + kGoAwayDelay, 0.6 * patience);
  while (clock.Now() - start < most && server_->connections() > 0) {
    if (clock.Now() - start >= kSilence && calls_->QuietFor(kSilence)) return;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

DrainOutcome RouterRuntime::Drain(absl::Duration deadline) {
  const base::Clock& clock = base::Clock::Real();
  const absl::Time end = clock.Now() + deadline;
  report_gate_->Close();
  discovery_.reset();
  StopServing();
  core_->AnnounceDrain();
  server_->StopListening();
  for (const auto& facade : facades_) facade->BeginDrain();
  const uint64_t ended_before = core_->ended();
  WaitForClientsToLeave(deadline);
  core_->BeginDrain();
  for (const auto& facade : facades_) facade->EndStreams();
  size_t aborted = 0;
  if (!core_->WaitIdle(end)) {
    aborted = core_->in_flight();
    core_->CancelAll(router::CancelReason::kShutdown);
    core_->WaitIdle(clock.Now() + absl::Seconds(5));
  }
  // Wait until clients have read the answers and refusals of their last calls.
  const absl::Time read = std::max(end, clock.Now() + absl::Seconds(1));
  while (calls_->open() > 0 && clock.Now() < read) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  server_->Shutdown(absl::Now() + absl::Seconds(1), /*hang_up=*/true);
  // Stop watching the workers.
  registry_->Stop();
  const uint64_t ended = core_->ended() - ended_before;
  return {.finished =
              static_cast<uint32_t>(ended - std::min<uint64_t>(ended, aborted)),
          .aborted = static_cast<uint32_t>(aborted)};
}

}  // namespace kvasir::cli
