// The ranks that a command starts on its host, with its own flags.
#pragma once

#include <memory>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "server/flags/options.h"
#include "server/ranks/local_ranks.h"
#include "server/ranks/rank_flags.h"

namespace kvasir::cli {

// Null where `command` (serve, worker or rank) is the only rank of this host.
// `rank`: the subcommand that the others run; they are given what was said of
// its flags, but for those of this process's own ports and files.
absl::StatusOr<std::unique_ptr<LocalRanks>> StartLocalRanks(
    const CLI::App& command, const CLI::App& rank, const RankFlags& flags,
    const ListenFlags& listen);

// For tests: the arguments of the i-th behind the first.
std::vector<std::string> ChildArguments(const CLI::App& command,
                                        const CLI::App& rank,
                                        const RankFlags& flags,
                                        const ListenFlags& listen, int index);

}  // namespace kvasir::cli
