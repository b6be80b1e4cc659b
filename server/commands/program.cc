#include "server/commands/program.h"

#include "base/cli/progress.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/ranks/child_arguments.h"
#include "worker/load/device.h"

namespace kvasir::cli {

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
    // Show no progress for small models, which load in a moment.
    if (total < (int64_t{256} << 20)) return;
    if (*progress == nullptr) {
      *progress = std::make_unique<Progress>("loading weights", total >> 20,
                                             "MiB", true);
    }
    (*progress)->Update(done >> 20);
    if (done == total) (*progress)->Finish();
  };
}

RankGroupSettings GroupSettings(const ModelProgramConfig& config,
                                const std::shared_ptr<base::TlsWatch>& tls,
                                OperatorSurface* operators) {
  RankGroupSettings settings;
  settings.flags = config.ranks;
  settings.insecure = config.listen.insecure;
  settings.collective = CollectiveOf(config.ranks, config.model.device);
  settings.deterministic = config.model.deterministic;
  settings.metrics = operators->metrics_target();
  settings.tls = tls;
  settings.step_timeout = config.engine.watchdog > absl::ZeroDuration()
                              ? config.engine.watchdog
                              : absl::InfiniteDuration();
  settings.on_fatal = [operators](const std::string& why) {
    operators->Fail(why);
  };
  settings.on_drain_asked = [operators] { operators->RequestDrain(); };
  return settings;
}

std::unique_ptr<LeaderGroup> MakeLeader(
    const ModelProgramConfig& config,
    const std::shared_ptr<base::TlsWatch>& tls, OperatorSurface* operators,
    LocalRanks* children) {
  if (config.ranks.tp == 1) return nullptr;
  return std::make_unique<LeaderGroup>(GroupSettings(config, tls, operators),
                                       children);
}

void RequireUsable(const absl::Status& flags) {
  if (!flags.ok()) throw CLI::ValidationError(std::string(flags.message()));
}

void RequireUsableModel(const ModelProgramConfig& config) {
  RequireModel(config.model);
  RequireUsable(CheckCollective(config.ranks, config.model.device));
}

absl::StatusOr<std::unique_ptr<LocalRanks>> StartOtherRanks(
    const CLI::App& command, const ModelProgramConfig& config) {
  if (config.ranks.tp > 1) base::SetLogRank(config.ranks.rank);
  return StartLocalRanks(command, *command.get_parent()->get_subcommand("rank"),
                         config.ranks, config.listen);
}

absl::StatusOr<int> RunNode(OperatorSurface* operators, Node* node,
                            const Node::MetricsSources& more) {
  KVASIR_RETURN_IF_ERROR(operators->Ready(*node, more));
  return operators->WaitAndDrain(node);
}

int FinishProgram(const CLI::App& command, const absl::StatusOr<int>& code) {
  if (code.ok()) return *code;
  PrintError("kvasir " + command.get_name(), code.status().ToString());
  return kExitFailed;
}

}  // namespace kvasir::cli
