// `kvasir rank`: runs a tensor-parallel rank other than 0. Rank 0 is a `kvasir
// worker` or `kvasir serve`.
#include <memory>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "server/commands/commands.h"
#include "server/commands/program.h"
#include "server/runtime/rank_runtime.h"
#include "worker/load/device.h"

namespace kvasir::cli {
namespace {

struct RankConfig : ModelProgramConfig {
  void CheckUsage() const {
    RequireModel(model);
    RequireUsable(CheckFollowerFlags(ranks));
    RequireUsableModel(*this);
  }
  absl::StatusOr<int> Run(const CLI::App& command,
                          SurfaceOptions surface) const;
};

absl::StatusOr<int> RankConfig::Run(const CLI::App& command,
                                    SurfaceOptions surface) const {
  KVASIR_ASSIGN_OR_RETURN(const auto children, StartOtherRanks(command, *this));
  surface.metrics_only = ranks.join_fd >= 0;
  const std::shared_ptr<base::TlsWatch> tls = surface.tls;
  RankRuntimeOptions options;
  if (surface.metrics_only) {
    const auto join = LocalRanks::ReadJoinInfo(ranks.join_fd);
    // Print no error, because the program that started this rank has usually
    // ended and reported the cause.
    if (!join.ok()) return kExitFailed;
    options.join = *join;
  } else {
    options.join.leader = ranks.leader;
    KVASIR_ASSIGN_OR_RETURN(options.join.secret, ReadSecret(ranks.secret_file));
    options.join.local.count = ranks.local_ranks;
  }
  const absl::Cleanup ended = [this] {
    if (ranks.join_fd >= 0) LocalRanks::KillStoppedParent();
  };
  KVASIR_ASSIGN_OR_RETURN(const auto operators,
                          OperatorSurface::Start(std::move(surface)));
  options.children = children.get();
  options.model = model;
  options.engine = engine;
  options.group = GroupSettings(*this, tls, operators.get());
  options.on_drained = [operators = operators.get()] {
    operators->RequestDrain();
  };
  KVASIR_ASSIGN_OR_RETURN(const auto rank,
                          RankRuntime::Create(std::move(options)));
  operators->SetServing(true);
  return RunNode(operators.get(), rank.get());
}

}  // namespace

void AddRankCommand(CLI::App* app, int* exit_code) {
  auto config = std::make_shared<RankConfig>();
  CLI::App* command = app->add_subcommand(
      "rank",
      "run a rank of a replica whose leader (kvasir worker or "
      "serve with --tp and --rank-listen) is on another host");
  AddModelFlags(command, &config->model);
  AddDeviceFlags(command, &config->model.device);
  AddStepFlags(command, &config->engine);
  AddFollowerFlags(command, &config->ranks);
  AddListenFlags(command, &config->listen, CalledBy::kOperators);
  AddCommonFlags(command, &config->common);
  SetProgram(command, config, exit_code);
}

}  // namespace kvasir::cli
