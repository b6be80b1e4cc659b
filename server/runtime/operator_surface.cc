#include "server/runtime/operator_surface.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cli/exit_code.h"
#include "base/cli/process.h"
#include "base/log.h"
#include "base/net/header_blocks.h"
#include "base/net/listen_address.h"
#include "base/net/process_metrics.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "worker/engine/vllm_metrics.h"

namespace kvasir::cli {
namespace {

// The most connections of the admin port. The health port accepts four times
// as many.
constexpr size_t kFewConnections = 64;
// The admin and health ports close idle connections after this time, so that a
// probe can always connect.
constexpr absl::Duration kIdle = absl::Seconds(5);

// A failed program that has not ended after this time is stopped by force.
constexpr absl::Duration kMostToEnd = absl::Seconds(20);

// Writes the file completely or not at all, because a process may be waiting
// for it and read it at once.
absl::Status WriteWhole(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::trunc);
    file << text;
    if (!file.flush()) {
      return absl::UnavailableError(
          absl::StrCat("--ready-file ", path, ": cannot write the file"));
    }
  }
  if (std::rename(part.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(
        absl::StrCat("--ready-file ", path, ": cannot write the file"));
  }
  return absl::OkStatus();
}

// Returns the flags of an example call of `kvasir generate`. If the chat
// template contains <|im_start|>, the example is a question in this format.
const char* ExampleRequest(const model::Tokenizer& tokenizer) {
  if (!absl::StrContains(tokenizer.chat_template(), "<|im_start|>")) {
    return R"(--prompt "It was a dark night")";
  }
  return R"(--temperature 0 --prompt $'<|im_start|>user\nWhat is the capital )"
         R"(of France?<|im_end|>\n<|im_start|>assistant\n')";
}

void PrintReady(const nlohmann::ordered_json& json,
                const model::Tokenizer* tokenizer) {
  const auto text = [&json](const char* key) {
    return json[key].get<std::string>();
  };
  const bool is_rank = json.contains("leader");
  std::printf(
      "kvasir %s is ready: %s %s, metrics http://%s/metrics, admin %s\n",
      text("program").c_str(), is_rank ? "leader" : "gRPC",
      text(is_rank ? "leader" : "grpc").c_str(), text("metrics").c_str(),
      text("admin").c_str());
  if (!json.contains("model")) return;
  if (tokenizer != nullptr) {
    std::printf("try: %s generate --endpoint %s %s\n", ProgramPath().c_str(),
                text("grpc").c_str(), ExampleRequest(*tokenizer));
  } else {
    std::printf(
        "no tokenizer, so clients must send token ids (use "
        "--model with a folder that has a tokenizer)\n");
  }
}

}  // namespace

OperatorSurface::OperatorSurface(SurfaceOptions options)
    : options_(std::move(options)),
      admin_(options_.program, options_.config_toml,
             options_.listen.drain_timeout, &latch_) {}

absl::StatusOr<std::unique_ptr<OperatorSurface>> OperatorSurface::Start(
    SurfaceOptions options) {
  auto surface =
      std::unique_ptr<OperatorSurface>(new OperatorSurface(std::move(options)));
  const ListenFlags& listen = surface->options_.listen;
  const bool own_metrics_host = !listen.metrics_host.empty();
  KVASIR_ASSIGN_OR_RETURN(surface->metrics_server_,
                          base::MetricsServer::Start(
                              surface->metrics_host(), listen.metrics_port,
                              own_metrics_host ? "--metrics-host" : "--host"));
  // Add these metrics before the node exists, so that they are reported while
  // its model is loading.
  surface->metrics_server_->Add(std::make_shared<base::ProcessMetrics>());
  surface->metrics_server_->Add(surface->options_.tls);
  surface->metrics_server_->Add(base::TlsRefusals::OfProcess());
  surface->metrics_server_->Add(std::make_shared<base::HeaderBlockMetrics>());
  if (surface->options_.metrics_only) return surface;
  base::GrpcServerOptions health;
  health.listen.host = listen.host;
  if (!listen.health_host.empty()) {
    health.listen.host = listen.health_host;
    health.listen.host_flag = "--health-host";
  }
  health.listen.port = listen.health_port;
  health.listen.flag = "--health-port";
  // The limit is high, so that even in a flood of new connections a probe is
  // answered before its connection is replaced.
  health.max_connections = 4 * kFewConnections;
  health.replace_oldest_connection = true;
  health.max_connection_idle = kIdle;
  health.handshake_timeout = kIdle;
  KVASIR_ASSIGN_OR_RETURN(surface->health_server_,
                          base::GrpcServer::Start(health, {}));
  base::GrpcServerOptions admin;
  admin.listen = AdminAddress(listen);
  const auto& callers = surface->options_.callers;
  KVASIR_ASSIGN_OR_RETURN(
      admin.credentials,
      AdminCredentials(listen, admin.listen, surface->options_.tls.get(),
                       callers != nullptr));
  // An admin port with plain text is open only to this machine. All users of
  // the machine may act as operators.
  if (admin.credentials != nullptr) surface->admin_.RequireCallers(callers);
  admin.health_service = false;
  admin.max_connections = kFewConnections;
  admin.max_connection_idle = kIdle;
  admin.handshake_timeout = kIdle;
  KVASIR_ASSIGN_OR_RETURN(surface->admin_server_,
                          base::GrpcServer::Start(admin, {&surface->admin_}));
  return surface;
}

const std::string& OperatorSurface::metrics_host() const {
  const ListenFlags& listen = options_.listen;
  return listen.metrics_host.empty() ? listen.host : listen.metrics_host;
}

std::string OperatorSurface::metrics_target() const {
  return base::JoinHostPort(metrics_host(), metrics_server_->port());
}

void OperatorSurface::SetServing(bool serving) {
  base::MutexLock lock(&health_mutex_);
  serving_ = serving;
  PublishHealth();
}

bool OperatorSurface::serving() const {
  base::MutexLock lock(&health_mutex_);
  return Serves();
}

void OperatorSurface::PublishHealth() {
  const bool serving = Serves();
  metrics_server_->SetReady(serving);
  if (health_server_ != nullptr) health_server_->SetServing("", serving);
}

void OperatorSurface::Fail(const std::string& why) {
  // Only the first failure counts, because later failures are its effects.
  if (!failed_.exchange(true)) {
    base::LogError("exiting", {{"why", why}});
    // The process may hang while it ends, for example if a library waits for a
    // lost rank. This thread then stops it by force.
    std::thread([] {
      absl::SleepFor(kMostToEnd);
      base::LogError("the program did not end in time and is stopped by force");
      std::_Exit(kExitFailed);
    }).detach();
  }
  {
    base::MutexLock lock(&health_mutex_);
    PublishHealth();
  }
  latch_.Request(absl::ZeroDuration());
}

absl::Status OperatorSurface::Ready(const Node& node,
                                    const Node::MetricsSources& more) {
  const NodeReport report = node.Report();
  Node::MetricsSources sources = node.Metrics();
  sources.insert(sources.end(), more.begin(), more.end());
  for (const auto& source : sources) {
    metrics_server_->Add(source);
    if (options_.common.metrics_compat == "vllm") {
      metrics_server_->Add(
          std::make_shared<base::VllmMetrics>(source, node.model_name()));
    }
  }
  {
    base::MutexLock lock(&health_mutex_);
    ready_ = true;
    PublishHealth();
  }
  HoldShutdownSignals();
  latch_.Open();
  if (options_.metrics_only || failed_) return absl::OkStatus();
  const bool is_rank = !report.leader.empty();
  nlohmann::ordered_json json{
      {"program", options_.program},
      {is_rank ? "leader" : "grpc", is_rank ? report.leader : report.grpc},
      {"admin", admin_server_->target()},
      {"health", health_server_->target()},
      {"metrics", metrics_target()}};
  if (!report.model.empty()) json["model"] = report.model;
  if (!report.ranks.empty()) {
    json["ranks"].push_back({{"rank", 0},
                             {"host", HostName()},
                             {"pid", getpid()},
                             {"metrics", metrics_target()}});
  }
  for (const worker::RankMember& member : report.ranks) {
    json["ranks"].push_back({{"rank", member.rank},
                             {"host", member.host},
                             {"pid", member.pid},
                             {"metrics", member.metrics_address}});
  }
  if (!options_.listen.ready_file.empty()) {
    KVASIR_RETURN_IF_ERROR(
        WriteWhole(options_.listen.ready_file, json.dump() + "\n"));
  }
  if (options_.common.json) {
    std::printf("%s\n", json.dump().c_str());
  } else {
    PrintReady(json, report.tokenizer);
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

int OperatorSurface::WaitAndDrain(Node* node) {
  absl::Duration deadline = options_.listen.drain_timeout;
  while (!latch_.WaitRequested(absl::Milliseconds(100), &deadline)) {
    if (ShutdownRequested()) latch_.Request(options_.listen.drain_timeout);
  }
  {
    base::MutexLock lock(&health_mutex_);
    ready_ = false;
    PublishHealth();
  }
  base::LogInfo("draining", {{"deadline", absl::FormatDuration(deadline)}});
  const DrainOutcome outcome = node->Drain(deadline);
  base::LogInfo("drained",
                {{"finished", outcome.finished}, {"aborted", outcome.aborted}});
  latch_.Complete(outcome);
  // Leave time for the answer to the Drain call.
  if (admin_server_ != nullptr) {
    admin_server_->Shutdown(absl::Now() + absl::Seconds(1));
  }
  return failed_ ? kExitFailed : kExitOk;
}

}  // namespace kvasir::cli
