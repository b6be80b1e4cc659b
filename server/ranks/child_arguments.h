// Starts the other tensor-parallel ranks of this host as child processes, with
// the flags of the running command.
#pragma once

#include <memory>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "server/flags/options.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"

namespace kvasir::cli {

// Starts the other ranks of this host. Returns null if this process is the only
// rank here. The children run the subcommand `rank`. They get those flags of
// `command` that `rank` also has, except the flags for this process's own ports
// and files.
absl::StatusOr<std::unique_ptr<LocalRanks>> StartLocalRanks(
    const CLI::App& command, const CLI::App& rank, const RankFlags& flags,
    const ListenFlags& listen);

// For tests: the arguments of the i-th rank after this one.
std::vector<std::string> ChildArguments(const CLI::App& command,
                                        const CLI::App& rank,
                                        const RankFlags& flags,
                                        const ListenFlags& listen, int index);

}  // namespace kvasir::cli
