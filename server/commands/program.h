// Code that the commands `serve`, `router`, `worker` and `rank` share. It
// creates a node (the running server) from the flags and runs it until it
// is drained.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/cli/flags.h"
#include "base/net/listen_address.h"
#include "base/net/tls.h"
#include "server/flags/options.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"
#include "server/ranks/rank_group.h"
#include "server/runtime/operator_surface.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {

// The flags of a program that runs a model, or one rank of it.
struct ModelProgramConfig {
  ModelOptions model;
  EngineFlags engine;
  RankFlags ranks;
  ListenFlags listen;
  CommonFlags common;
};

// The address of the clients' port.
base::ListenAddress ClientAddress(const ListenFlags& flags);

// Returns a function that shows the progress of loading a large model on
// standard error.
std::function<void(int64_t done, int64_t total)> LoadProgress();

// The settings of a tensor-parallel group; `operators` must outlive the group.
RankGroupSettings GroupSettings(const ModelProgramConfig& config,
                                const std::shared_ptr<base::TlsWatch>& tls,
                                OperatorSurface* operators);

// Creates the part of the tensor-parallel group that runs in rank 0. Returns
// null if one process runs the whole model. `operators` and `children` must
// outlive the group.
std::unique_ptr<LeaderGroup> MakeLeader(
    const ModelProgramConfig& config,
    const std::shared_ptr<base::TlsWatch>& tls, OperatorSurface* operators,
    LocalRanks* children);

// Throws CLI::ValidationError if `flags` is an error, so that the program ends
// with the exit code of wrong usage.
void RequireUsable(const absl::Status& flags);
// Calls RequireModel. Throws a CLI::ValidationError if the device does not
// support --collective.
void RequireUsableModel(const ModelProgramConfig& config);

// Starts the other ranks of this host. Returns null if there are none. Call it
// before this process has threads, connections or much memory.
absl::StatusOr<std::unique_ptr<LocalRanks>> StartOtherRanks(
    const CLI::App& command, const ModelProgramConfig& config);

// Serves the node until it is drained. Returns the exit code.
absl::StatusOr<int> RunNode(OperatorSurface* operators, Node* node,
                            const Node::MetricsSources& more = {});

// Returns the exit code. Prints the error if the command failed.
int FinishProgram(const CLI::App& command, const absl::StatusOr<int>& code);

// Makes the command run a program. `Config` must have the members `listen`,
// `common`, CheckUsage() and Run(command, SurfaceOptions). Run returns the
// exit code.
template <typename Config>
void SetProgram(CLI::App* command, std::shared_ptr<Config> config,
                int* exit_code) {
  command->callback([command, config = std::move(config), exit_code] {
    const std::string toml = EffectiveConfig(*command);
    if (config->common.print_config) {
      std::printf("%s", toml.c_str());
      return;
    }
    config->CheckUsage();
    const absl::Status logs = ApplyCommonFlags(config->common);
    *exit_code = FinishProgram(
        *command,
        logs.ok()
            ? config->Run(*command, {.program = command->get_name(),
                                     .config_toml = toml,
                                     .listen = config->listen,
                                     .common = config->common,
                                     .tls = std::make_shared<base::TlsWatch>()})
            : absl::StatusOr<int>(logs));
  });
}

}  // namespace kvasir::cli
