// `kvasir serve`, `kvasir router`, `kvasir worker`.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/net/grpc_server.h"
#include "base/status_macros.h"
#include "cli/commands.h"
#include "cli/device/device.h"
#include "cli/flags.h"
#include "cli/known_models.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/runtime/identity_watch.h"
#include "cli/runtime/operator_surface.h"
#include "cli/runtime/router_runtime.h"
#include "cli/runtime/serve_stack.h"
#include "cli/runtime/worker_runtime.h"

namespace kvasir::cli {
namespace {

struct ServeFlags {
  ModelOptions model;
  EngineFlags engine;
  ListenFlags listen;
  RouterFlags router;
  CommonFlags common;
  // Of a worker.
  std::string worker_listen = "127.0.0.1:8100";
  // Of a router.
  absl::Duration start_timeout = absl::Seconds(30);
};

// "unix:/path" or "host:port".
absl::StatusOr<base::ListenAddress> ParseListen(const std::string& text) {
  base::ListenAddress address;
  address.flag = address.host_flag = "--listen";
  if (absl::StartsWith(text, "unix:")) {
    address.unix_path = text.substr(5);
    if (!address.unix_path.empty()) return address;
  } else {
    const size_t colon = text.rfind(':');
    if (colon != std::string::npos && colon > 0 &&
        absl::SimpleAtoi(text.substr(colon + 1), &address.port) &&
        address.port >= 0 && address.port <= 65535) {
      address.host = text.substr(0, colon);
      return address;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text, "' is no address: want HOST:PORT or unix:/path/of/socket"));
}

base::ListenAddress ClientAddress(const ListenFlags& flags) {
  base::ListenAddress address;
  address.host = flags.host;
  address.port = flags.grpc_port;
  address.flag = "--grpc-port";
  return address;
}

std::function<void(int64_t, int64_t)> LoadProgress() {
  auto progress = std::make_shared<std::unique_ptr<Progress>>();
  return [progress](int64_t done, int64_t total) {
    // Small models are there before anyone could read it.
    if (total < (int64_t{256} << 20)) return;
    if (*progress == nullptr) {
      *progress = std::make_unique<Progress>("loading weights", total >> 20,
                                             "MiB", true);
    }
    (*progress)->Update(done >> 20);
    if (done == total) (*progress)->Finish();
  };
}

absl::StatusOr<int> RunServe(const ServeFlags& flags, SurfaceOptions surface) {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto identities,
                          IdentityWatch::Start(flags.router, flags.listen));
  surface.callers = identities->callers();
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  ServeStackOptions options;
  options.model = flags.model;
  options.engine = flags.engine;
  options.router = flags.router;
  options.router.max_queue = flags.engine.max_queue;
  options.listen = ClientAddress(flags.listen);
  KVASIR_ASSIGN_OR_RETURN(
      options.credentials,
      ListenCredentials(flags.listen, options.listen, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(options.listen));
  options.callers = identities->callers();
  options.max_connections = flags.listen.max_connections;
  KVASIR_ASSIGN_OR_RETURN(options.max_connection_age,
                          MaxConnectionAge(flags.listen));
  options.drain_timeout = flags.listen.drain_timeout;
  options.progress = LoadProgress();
  options.on_fatal = [&operators](const std::string& why) {
    operators->Fail(why);
  };
  options.on_health = [&operators](bool serving) {
    operators->SetServing(serving);
  };
  KVASIR_ASSIGN_OR_RETURN(const auto stack,
                          ServeStack::Create(std::move(options)));
  const std::string name = stack->router().model_names().front();
  KVASIR_RETURN_IF_ERROR(operators->Ready(
      {.grpc = stack->router().target(),
       .model = name,
       .tokenizer = stack->router().tokenizer()},
      name,
      {stack->worker().metrics(), stack->worker().device_metrics(),
       stack->router().metrics(), identities->metrics()}));
  return operators->WaitAndDrain(
      [&stack](absl::Duration deadline) { return stack->Drain(deadline); });
}

absl::StatusOr<int> RunWorker(const ServeFlags& flags, SurfaceOptions surface) {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  WorkerRuntimeOptions options;
  options.model = flags.model;
  options.engine = flags.engine;
  KVASIR_ASSIGN_OR_RETURN(options.listen, ParseListen(flags.worker_listen));
  KVASIR_ASSIGN_OR_RETURN(
      options.credentials,
      WorkerListenCredentials(flags.listen, options.listen, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(options.listen));
  options.drain_timeout = flags.listen.drain_timeout;
  options.progress = LoadProgress();
  options.on_fatal = [&operators](const std::string& why) {
    operators->Fail(why);
  };
  if (!flags.model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const auto tokenizer,
                            LoadTokenizer(flags.model.model));
    if (tokenizer != nullptr) options.tokenizer_hash = tokenizer->hash();
  }
  KVASIR_ASSIGN_OR_RETURN(const auto worker,
                          WorkerRuntime::Create(std::move(options)));
  operators->SetServing(true);
  KVASIR_RETURN_IF_ERROR(operators->Ready(
      {.grpc = worker->target()}, worker->model().source().name,
      {worker->metrics(), worker->device_metrics()}));
  return operators->WaitAndDrain(
      [&worker](absl::Duration deadline) { return worker->Drain(deadline); });
}

absl::StatusOr<int> RunRouter(const ServeFlags& flags, SurfaceOptions surface) {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto identities,
                          IdentityWatch::Start(flags.router, flags.listen));
  surface.callers = identities->callers();
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  RouterRuntimeOptions options;
  options.router = flags.router;
  options.listen = ClientAddress(flags.listen);
  KVASIR_ASSIGN_OR_RETURN(
      options.credentials,
      ListenCredentials(flags.listen, options.listen, tls.get()));
  KVASIR_ASSIGN_OR_RETURN(
      options.worker_credentials,
      WorkerCredentials(flags.router, flags.listen.insecure, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(options.listen));
  options.callers = identities->callers();
  options.max_connections = flags.listen.max_connections;
  KVASIR_ASSIGN_OR_RETURN(options.max_connection_age,
                          MaxConnectionAge(flags.listen));
  options.on_health = [&operators](bool serving) {
    operators->SetServing(serving);
  };
  options.queue_timeout = flags.engine.queue_timeout;
  options.default_max_tokens = flags.engine.default_max_tokens;
  options.start_timeout = flags.start_timeout;
  if (!flags.model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(options.tokenizer,
                            LoadTokenizer(flags.model.model));
    options.tokenizer_folder = flags.model.model;
  }
  KVASIR_ASSIGN_OR_RETURN(const auto router,
                          RouterRuntime::Create(std::move(options)));
  const std::string name = router->model_names().front();
  KVASIR_RETURN_IF_ERROR(
      operators->Ready({.grpc = router->target(),
                        .model = name,
                        .tokenizer = router->tokenizer()},
                       name, {router->metrics(), identities->metrics()}));
  return operators->WaitAndDrain(
      [&router](absl::Duration deadline) { return router->Drain(deadline); });
}

using Program = absl::StatusOr<int> (*)(const ServeFlags&, SurfaceOptions);

absl::StatusOr<int> RunProgram(Program program, const ServeFlags& flags,
                               const std::string& name,
                               const std::string& config) {
  KVASIR_RETURN_IF_ERROR(ApplyCommonFlags(flags.common));
  return program(flags, {.program = name,
                         .config_toml = config,
                         .listen = flags.listen,
                         .common = flags.common,
                         .tls = std::make_shared<base::TlsWatch>()});
}

void SetProgram(CLI::App* command, std::shared_ptr<ServeFlags> flags,
                Program program, int* exit_code) {
  command->callback([command, flags, program, exit_code] {
    const std::string config = EffectiveConfig(*command);
    if (flags->common.print_config) {
      std::printf("%s", config.c_str());
      return;
    }
    if (program != RunRouter) RequireModel(flags->model);
    const absl::StatusOr<int> code =
        RunProgram(program, *flags, command->get_name(), config);
    if (code.ok()) {
      *exit_code = *code;
      return;
    }
    PrintError("kvasir " + command->get_name(), code.status().ToString());
    *exit_code = kExitFailed;
  });
}

}  // namespace

void AddServeCommands(CLI::App* app, int* exit_code) {
  {
    auto flags = std::make_shared<ServeFlags>();
    CLI::App* command = app->add_subcommand(
        "serve", "router and worker in one process: the laptop default");
    AddModelFlags(command, &flags->model);
    AddDeviceFlags(command, &flags->model.device);
    AddEngineFlags(command, &flags->engine);
    AddListenFlags(command, &flags->listen, /*with_grpc_port=*/true);
    AddRouterFlags(command, &flags->router, /*with_workers=*/false);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunServe, exit_code);
  }
  {
    auto flags = std::make_shared<ServeFlags>();
    CLI::App* command = app->add_subcommand(
        "worker", "one replica of a model, for routers to call");
    AddModelFlags(command, &flags->model);
    AddDeviceFlags(command, &flags->model.device);
    AddEngineFlags(command, &flags->engine);
    AddFlag(command, "--listen", flags->worker_listen,
            "where routers call: HOST:PORT or unix:/path")
        ->check(Checked([](const std::string& text) {
          return ParseListen(text).status();
        }));
    AddListenFlags(command, &flags->listen, /*with_grpc_port=*/false);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunWorker, exit_code);
  }
  {
    auto flags = std::make_shared<ServeFlags>();
    CLI::App* command = app->add_subcommand(
        "router", "clients' protocols in front of one or more workers");
    AddModelFlag(
        command, "--model", flags->model.model,
        "folder of the workers' tokenizer, or a known model's name; without "
        "it, token ids only");
    AddDuration(
        command, "--start-timeout", flags->start_timeout,
        "how long the first worker may take to answer at start; others that "
        "do not answer then are connected to when they come");
    AddDuration(command, "--queue-timeout", flags->engine.queue_timeout,
                "how long a request may wait for a worker");
    AddFlag(command, "--default-max-tokens", flags->engine.default_max_tokens,
            "output tokens where a request does not say");
    AddListenFlags(command, &flags->listen, /*with_grpc_port=*/true);
    AddRouterFlags(command, &flags->router, /*with_workers=*/true);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunRouter, exit_code);
  }
}

}  // namespace kvasir::cli
