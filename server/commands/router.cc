// `kvasir router`: accepts clients' requests and sends each of them to
// a worker.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/net/grpc_server.h"
#include "base/status_macros.h"
#include "model/known_models.h"
#include "router/replicas/worker_source.h"
#include "server/commands/commands.h"
#include "server/commands/program.h"
#include "server/runtime/identity_watch.h"
#include "server/runtime/router_runtime.h"

namespace kvasir::cli {
namespace {

constexpr absl::Duration kLeastWorkersRefresh = absl::Milliseconds(100);

struct RouterConfig {
  std::string tokenizer_folder;
  absl::Duration start_timeout = absl::Seconds(30);
  absl::Duration queue_timeout = absl::Minutes(5);
  int64_t default_max_tokens = 256;
  ListenFlags listen;
  RouterFlags router;
  CommonFlags common;

  void CheckUsage() const {
    RequireUsable(router::ParseWorkers(router.workers).status());
    if (router.workers_refresh < kLeastWorkersRefresh) {
      RequireUsable(absl::InvalidArgumentError(absl::StrCat(
          "--workers-refresh ", absl::FormatDuration(router.workers_refresh),
          ": it must be at least ",
          absl::FormatDuration(kLeastWorkersRefresh))));
    }
  }
  absl::StatusOr<int> Run(const CLI::App& command,
                          SurfaceOptions surface) const;
};

absl::StatusOr<int> RouterConfig::Run(const CLI::App& /*command*/,
                                      SurfaceOptions surface) const {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto identities,
                          IdentityWatch::Start(router, listen));
  surface.callers = identities->callers();
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  RouterRuntimeOptions options;
  options.router = router;
  options.listen = ClientAddress(listen);
  KVASIR_ASSIGN_OR_RETURN(options.credentials,
                          ListenCredentials(listen, options.listen, tls.get()));
  KVASIR_ASSIGN_OR_RETURN(
      options.worker_credentials,
      WorkerCredentials(router, listen.insecure, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(options.listen));
  options.callers = identities->callers();
  options.max_connections = listen.max_connections;
  KVASIR_ASSIGN_OR_RETURN(options.max_connection_age, MaxConnectionAge(listen));
  options.on_health = [&operators](bool serving) {
    operators->SetServing(serving);
  };
  options.queue_timeout = queue_timeout;
  options.default_max_tokens = default_max_tokens;
  options.start_timeout = start_timeout;
  if (!tokenizer_folder.empty()) {
    KVASIR_ASSIGN_OR_RETURN(options.tokenizer, LoadTokenizer(tokenizer_folder));
    options.tokenizer_folder = tokenizer_folder;
  }
  KVASIR_ASSIGN_OR_RETURN(const auto runtime,
                          RouterRuntime::Create(std::move(options)));
  return RunNode(operators.get(), runtime.get(), {identities->metrics()});
}

}  // namespace

void AddRouterCommand(CLI::App* app, int* exit_code) {
  auto config = std::make_shared<RouterConfig>();
  CLI::App* command = app->add_subcommand(
      "router", "serve clients' requests by one or more workers");
  AddModelFlag(command, "--model", config->tokenizer_folder,
               "folder or GGUF file with the workers' tokenizer, or the name "
               "of a known model; without it, requests must contain token "
               "ids");
  AddDuration(command, "--start-timeout", config->start_timeout,
              "how long the start waits for the first worker; then the router "
              "starts without one, is not ready, and uses workers as soon as "
              "they answer");
  AddDuration(command, "--queue-timeout", config->queue_timeout,
              "how long a request may wait for a place or for a "
              "ready worker");
  AddFlag(command, "--default-max-tokens", config->default_max_tokens,
          "the most output tokens of a request that does not set a "
          "limit");
  AddListenFlags(command, &config->listen, CalledBy::kClients);
  AddRouterFlags(command, &config->router, /*with_workers=*/true);
  AddCommonFlags(command, &config->common);
  SetProgram(command, config, exit_code);
}

}  // namespace kvasir::cli
