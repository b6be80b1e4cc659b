// `kvasir worker`: runs one replica of a model for routers.
#include <memory>
#include <string>
#include <utility>

#include "base/cli/flags.h"
#include "base/net/grpc_server.h"
#include "base/status_macros.h"
#include "server/commands/commands.h"
#include "server/commands/program.h"
#include "server/runtime/router_runtime.h"
#include "server/runtime/worker_runtime.h"
#include "worker/load/device.h"

namespace kvasir::cli {
namespace {

struct WorkerConfig : ModelProgramConfig {
  std::string routers_listen = "127.0.0.1:8100";

  void CheckUsage() const {
    RequireModel(model);
    RequireUsable(CheckLeaderFlags(ranks));
    RequireUsableModel(*this);
  }
  absl::StatusOr<int> Run(const CLI::App& command,
                          SurfaceOptions surface) const;
};

absl::StatusOr<int> WorkerConfig::Run(const CLI::App& command,
                                      SurfaceOptions surface) const {
  KVASIR_ASSIGN_OR_RETURN(const auto children, StartOtherRanks(command, *this));
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  WorkerRuntimeOptions options;
  options.model = model;
  options.engine = engine;
  options.group = MakeLeader(*this, tls, operators.get(), children.get());
  KVASIR_ASSIGN_OR_RETURN(const base::ListenAddress address,
                          ParseListen(routers_listen, "--listen"));
  KVASIR_ASSIGN_OR_RETURN(options.credentials,
                          WorkerListenCredentials(listen, address, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(address));
  options.listen = [address] { return address; };
  options.progress = LoadProgress();
  options.on_fatal = [&operators](const std::string& why) {
    operators->Fail(why);
  };
  if (!model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(options.tokenizer, LoadTokenizer(model.model));
  }
  KVASIR_ASSIGN_OR_RETURN(const auto worker,
                          WorkerRuntime::Create(std::move(options)));
  operators->SetServing(true);
  return RunNode(operators.get(), worker.get());
}

}  // namespace

void AddWorkerCommand(CLI::App* app, int* exit_code) {
  auto config = std::make_shared<WorkerConfig>();
  CLI::App* command = app->add_subcommand(
      "worker", "run one replica of a model, which routers call");
  AddModelFlags(command, &config->model);
  AddDeviceFlags(command, &config->model.device);
  AddEngineFlags(command, &config->engine);
  AddFlag(command, "--listen", config->routers_listen,
          "address on which routers call: HOST:PORT or unix:/path")
      ->check(Checked([](const std::string& text) {
        return ParseListen(text, "--listen").status();
      }));
  AddLeaderFlags(command, &config->ranks);
  AddListenFlags(command, &config->listen, CalledBy::kRouters);
  AddCommonFlags(command, &config->common);
  SetProgram(command, config, exit_code);
}

}  // namespace kvasir::cli
