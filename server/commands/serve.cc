// `kvasir serve`: runs a router and a worker in one process.
#include <memory>
#include <string>
#include <utility>

#include "base/cli/flags.h"
#include "base/net/grpc_server.h"
#include "base/status_macros.h"
#include "server/commands/commands.h"
#include "server/commands/program.h"
#include "server/runtime/identity_watch.h"
#include "server/runtime/serve_stack.h"
#include "worker/load/device.h"

namespace kvasir::cli {
namespace {

struct ServeConfig : ModelProgramConfig {
  RouterFlags router;

  void CheckUsage() const {
    RequireModel(model);
    RequireUsable(CheckLeaderFlags(ranks));
    RequireUsableModel(*this);
  }
  absl::StatusOr<int> Run(const CLI::App& command,
                          SurfaceOptions surface) const;
};

absl::StatusOr<int> ServeConfig::Run(const CLI::App& command,
                                     SurfaceOptions surface) const {
  KVASIR_ASSIGN_OR_RETURN(const auto children, StartOtherRanks(command, *this));
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto identities,
                          IdentityWatch::Start(router, listen));
  surface.callers = identities->callers();
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  ServeStackOptions options;
  options.model = model;
  options.engine = engine;
  options.group = MakeLeader(*this, tls, operators.get(), children.get());
  options.router = router;
  options.router.max_queue = engine.max_queue;
  options.listen = ClientAddress(listen);
  KVASIR_ASSIGN_OR_RETURN(options.credentials,
                          ListenCredentials(listen, options.listen, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(options.listen));
  options.callers = identities->callers();
  options.max_connections = listen.max_connections;
  KVASIR_ASSIGN_OR_RETURN(options.max_connection_age, MaxConnectionAge(listen));
  options.progress = LoadProgress();
  options.on_fatal = [&operators](const std::string& why) {
    operators->Fail(why);
  };
  options.on_health = [&operators](bool serving) {
    operators->SetServing(serving);
  };
  KVASIR_ASSIGN_OR_RETURN(const auto stack,
                          ServeStack::Create(std::move(options)));
  return RunNode(operators.get(), stack.get(), {identities->metrics()});
}

}  // namespace

void AddServeCommand(CLI::App* app, int* exit_code) {
  auto config = std::make_shared<ServeConfig>();
  CLI::App* command =
      app->add_subcommand("serve",
                          "run router and worker in one process, for a single "
                          "machine");
  AddModelFlags(command, &config->model);
  AddDeviceFlags(command, &config->model.device);
  AddEngineFlags(command, &config->engine);
  AddLeaderFlags(command, &config->ranks);
  AddListenFlags(command, &config->listen, CalledBy::kClients);
  AddRouterFlags(command, &config->router, /*with_workers=*/false);
  AddCommonFlags(command, &config->common);
  SetProgram(command, config, exit_code);
}

}  // namespace kvasir::cli
