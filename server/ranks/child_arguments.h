// The ranks that a command starts on its host, with its own flags.
#pragma once

#include <memory>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "server/flags/options.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"

namespace kvasir::cli {

// Starts the other ranks of this host; null if `command` (serve, worker or
// rank) is the only one. `rank` is the subcommand that they run. They get the
// flags of `command` that `rank` also has, except for this process's own ports
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
