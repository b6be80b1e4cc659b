// `kvasir serve`, `kvasir router`, `kvasir worker`, `kvasir rank`.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/exit_code.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/log.h"
#include "base/net/grpc_server.h"
#include "base/status_macros.h"
#include "server/commands.h"
#include "server/device/device.h"
#include "server/known_models.h"
#include "server/options.h"
#include "server/ranks/child_arguments.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"
#include "server/ranks/rank_group.h"
#include "server/runtime/identity_watch.h"
#include "server/runtime/operator_surface.h"
#include "server/runtime/rank_runtime.h"
#include "server/runtime/router_runtime.h"
#include "server/runtime/serve_stack.h"
#include "server/runtime/worker_runtime.h"

namespace kvasir::cli {
namespace {

struct ServeFlags {
  ModelOptions model;
  EngineFlags engine;
  RankFlags ranks;
  ListenFlags listen;
  RouterFlags router;
  CommonFlags common;
  // Of a worker.
  std::string worker_listen = "127.0.0.1:8100";
  // Of a router.
  absl::Duration start_timeout = absl::Seconds(30);
};

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

// `operators` and `children` outlive the group.
RankGroupSettings GroupSettings(const ServeFlags& flags,
                                const std::shared_ptr<base::TlsWatch>& tls,
                                OperatorSurface* operators) {
  RankGroupSettings settings;
  settings.flags = flags.ranks;
  settings.insecure = flags.listen.insecure;
  settings.collective = CollectiveOf(flags.ranks, flags.model.device);
  settings.deterministic = flags.model.deterministic;
  settings.metrics = operators->metrics_target();
  settings.tls = tls;
  settings.step_timeout = flags.engine.watchdog > absl::ZeroDuration()
                              ? flags.engine.watchdog
                              : absl::InfiniteDuration();
  settings.on_fatal = [operators](const std::string& why) {
    operators->Fail(why);
  };
  settings.on_drain_asked = [operators] { operators->RequestDrain(); };
  return settings;
}

// Null: one process runs the model.
std::unique_ptr<LeaderGroup> MakeLeader(
    const ServeFlags& flags, const std::shared_ptr<base::TlsWatch>& tls,
    OperatorSurface* operators, LocalRanks* children) {
  if (flags.ranks.tp == 1) return nullptr;
  return std::make_unique<LeaderGroup>(GroupSettings(flags, tls, operators),
                                       children);
}

std::vector<ReadyReport::Rank> RanksOf(const WorkerRuntime& worker,
                                       const OperatorSurface& operators) {
  std::vector<ReadyReport::Rank> ranks;
  const std::vector<worker::RankMember> members = worker.members();
  if (members.empty()) return ranks;
  ranks.push_back({.rank = 0,
                   .host = HostName(),
                   .pid = getpid(),
                   .metrics = operators.metrics_target()});
  for (const worker::RankMember& member : members) {
    ranks.push_back({.rank = member.rank,
                     .host = member.host,
                     .pid = member.pid,
                     .metrics = member.metrics_address});
  }
  return ranks;
}

absl::StatusOr<int> RunServe(const ServeFlags& flags, SurfaceOptions surface,
                             LocalRanks* children) {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto identities,
                          IdentityWatch::Start(flags.router, flags.listen));
  surface.callers = identities->callers();
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  ServeStackOptions options;
  options.model = flags.model;
  options.engine = flags.engine;
  options.group = MakeLeader(flags, tls, operators.get(), children);
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
  std::vector<std::shared_ptr<prometheus::Collectable>> sources =
      stack->worker().rank_metrics();
  sources.insert(sources.end(),
                 {stack->worker().metrics(), stack->router().metrics(),
                  identities->metrics()});
  KVASIR_RETURN_IF_ERROR(
      operators->Ready({.grpc = stack->router().target(),
                        .model = name,
                        .tokenizer = stack->router().tokenizer(),
                        .ranks = RanksOf(stack->worker(), *operators)},
                       name, sources));
  return operators->WaitAndDrain(
      [&stack](absl::Duration deadline) { return stack->Drain(deadline); });
}

absl::StatusOr<int> RunWorker(const ServeFlags& flags, SurfaceOptions surface,
                              LocalRanks* children) {
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  WorkerRuntimeOptions options;
  options.model = flags.model;
  options.engine = flags.engine;
  options.group = MakeLeader(flags, tls, operators.get(), children);
  KVASIR_ASSIGN_OR_RETURN(const base::ListenAddress listen,
                          ParseListen(flags.worker_listen, "--listen"));
  KVASIR_ASSIGN_OR_RETURN(
      options.credentials,
      WorkerListenCredentials(flags.listen, listen, tls.get()));
  KVASIR_RETURN_IF_ERROR(base::GrpcServer::CheckAddress(listen));
  options.listen = [listen] { return listen; };
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
  std::vector<std::shared_ptr<prometheus::Collectable>> sources =
      worker->rank_metrics();
  sources.push_back(worker->metrics());
  KVASIR_RETURN_IF_ERROR(operators->Ready(
      {.grpc = worker->target(), .ranks = RanksOf(*worker, *operators)},
      worker->model().source().name, sources));
  return operators->WaitAndDrain(
      [&worker](absl::Duration deadline) { return worker->Drain(deadline); });
}

// A rank behind the first.
absl::StatusOr<int> RunRank(const ServeFlags& flags, SurfaceOptions surface,
                            LocalRanks* children) {
  surface.metrics_only = flags.ranks.join_fd >= 0;
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  RankRuntimeOptions options;
  if (surface.metrics_only) {
    const auto join = LocalRanks::ReadJoinInfo(flags.ranks.join_fd);
    // Who started it has said why it is gone.
    if (!join.ok()) return kExitFailed;
    options.join = *join;
  } else {
    options.join.leader = flags.ranks.leader;
    KVASIR_ASSIGN_OR_RETURN(options.join.secret,
                            ReadSecret(flags.ranks.secret_file));
    options.join.local.count = flags.ranks.local_ranks;
  }
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  options.children = children;
  options.model = flags.model;
  options.engine = flags.engine;
  options.group = GroupSettings(flags, tls, operators.get());
  options.on_drained = [operators = operators.get()] {
    operators->RequestDrain();
  };
  KVASIR_ASSIGN_OR_RETURN(const auto rank,
                          RankRuntime::Create(std::move(options)));
  operators->SetServing(true);
  KVASIR_RETURN_IF_ERROR(operators->Ready({.leader = flags.ranks.leader},
                                          rank->model().source().name,
                                          rank->metrics()));
  // Its requests are the leader's.
  return operators->WaitAndDrain([&](absl::Duration deadline) {
    if (const absl::Status ended = rank->Drain(deadline); !ended.ok()) {
      operators->Fail(ended.ToString());
    }
    return DrainOutcome{};
  });
}

absl::StatusOr<int> RunRouter(const ServeFlags& flags, SurfaceOptions surface,
                              LocalRanks* /*children*/) {
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

using Program = absl::StatusOr<int> (*)(const ServeFlags&, SurfaceOptions,
                                        LocalRanks*);

absl::StatusOr<int> RunProgram(Program program, const ServeFlags& flags,
                               const CLI::App& command,
                               const std::string& config) {
  KVASIR_RETURN_IF_ERROR(ApplyCommonFlags(flags.common));
  if (flags.ranks.tp > 1) base::SetLogRank(flags.ranks.rank);
  // Before this process has threads, connections and memory.
  std::unique_ptr<LocalRanks> children;
  if (program != RunRouter) {
    KVASIR_ASSIGN_OR_RETURN(
        children,
        StartLocalRanks(command, *command.get_parent()->get_subcommand("rank"),
                        flags.ranks, flags.listen));
  }
  return program(flags,
                 {.program = command.get_name(),
                  .config_toml = config,
                  .listen = flags.listen,
                  .common = flags.common,
                  .tls = std::make_shared<base::TlsWatch>()},
                 children.get());
}

// Wrong usage, which has an exit code of its own.
void RequireUsable(const absl::Status& flags) {
  if (!flags.ok()) throw CLI::ValidationError(std::string(flags.message()));
}

void SetProgram(CLI::App* command, std::shared_ptr<ServeFlags> flags,
                Program program, int* exit_code) {
  command->callback([command, flags, program, exit_code] {
    const std::string config = EffectiveConfig(*command);
    if (flags->common.print_config) {
      std::printf("%s", config.c_str());
      return;
    }
    if (program != RunRouter) {
      RequireModel(flags->model);
      RequireUsable(program == RunRank ? CheckFollowerFlags(flags->ranks)
                                       : CheckLeaderFlags(flags->ranks));
      RequireUsable(CheckCollective(flags->ranks, flags->model.device));
    }
    const absl::StatusOr<int> code =
        RunProgram(program, *flags, *command, config);
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
    AddLeaderFlags(command, &flags->ranks);
    AddListenFlags(command, &flags->listen, CalledBy::kClients);
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
          return ParseListen(text, "--listen").status();
        }));
    AddLeaderFlags(command, &flags->ranks);
    AddListenFlags(command, &flags->listen, CalledBy::kRouters);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunWorker, exit_code);
  }
  {
    auto flags = std::make_shared<ServeFlags>();
    CLI::App* command = app->add_subcommand(
        "rank",
        "a rank of a replica whose leader (kvasir worker or serve, --tp and "
        "--rank-listen) is on another host");
    AddModelFlags(command, &flags->model);
    AddDeviceFlags(command, &flags->model.device);
    AddStepFlags(command, &flags->engine);
    AddFollowerFlags(command, &flags->ranks);
    AddListenFlags(command, &flags->listen, CalledBy::kOperators);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunRank, exit_code);
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
    AddListenFlags(command, &flags->listen, CalledBy::kClients);
    AddRouterFlags(command, &flags->router, /*with_workers=*/true);
    AddCommonFlags(command, &flags->common);
    SetProgram(command, flags, RunRouter, exit_code);
  }
}

}  // namespace kvasir::cli
