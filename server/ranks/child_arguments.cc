#include "server/ranks/child_arguments.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvasir::cli {
namespace {

// The flags that children do not get: those for this process's own ports, files
// and output, and those for ranks of other hosts. (A child receives the secret
// through a pipe.)
const std::set<std::string>& OwnFlags() {
  static const auto* const flags =
      new std::set<std::string>{"admin-client-ca",
                                "admin-client-names",
                                "admin-host",
                                "admin-port",
                                "health-host",
                                "health-port",
                                "help",
                                "join-fd",
                                "json",
                                "leader",
                                "local-ranks",
                                "metrics-port",
                                "print-config",
                                "rank",
                                "rank-metrics-port",
                                "rank-secret-file",
                                "ready-file",
                                "tls-cert",
                                "tls-key"};
  return *flags;
}

}  // namespace

std::vector<std::string> ChildArguments(const CLI::App& command,
                                        const CLI::App& rank,
                                        const RankFlags& flags,
                                        const ListenFlags& listen, int index) {
  std::vector<std::string> arguments = {
      "rank", absl::StrCat("--rank=", flags.rank + index), "--local-ranks=1",
      // If this process uses a free port for metrics (0), its children do
      // so too.
      absl::StrCat("--metrics-port=",
                   flags.metrics_port == 0 || listen.metrics_port == 0
                       ? 0
                       : flags.metrics_port + index)};
  // The leader's children connect to it over loopback. Children of other ranks
  // connect to a leader on another host, so they need TLS flags.
  const bool over_loopback = flags.leader.empty();
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty() || option->results().empty()) continue;
    const std::string& name = option->get_lnames().front();
    if (OwnFlags().count(name) > 0 ||
        rank.get_option_no_throw("--" + name) == nullptr ||
        (over_loopback && absl::StartsWith(name, "rank-tls-"))) {
      continue;
    }
    // If a flag for one value was given several times, only its last
    // value counts.
    const std::vector<std::string>& values = option->results();
    const bool list = option->get_expected_max() > 1;
    for (size_t i = list ? 0 : values.size() - 1; i < values.size(); ++i) {
      arguments.push_back(absl::StrCat("--", name, "=", values[i]));
    }
  }
  return arguments;
}

absl::StatusOr<std::unique_ptr<LocalRanks>> StartLocalRanks(
    const CLI::App& command, const CLI::App& rank, const RankFlags& flags,
    const ListenFlags& listen) {
  std::vector<LocalRanks::Child> children;
  for (int i = 1; i < flags.num_local(); ++i) {
    children.push_back(
        {.rank = flags.rank + i,
         .arguments = ChildArguments(command, rank, flags, listen, i)});
  }
  if (children.empty()) return std::unique_ptr<LocalRanks>();
  return LocalRanks::Start(children);
}

}  // namespace kvasir::cli
