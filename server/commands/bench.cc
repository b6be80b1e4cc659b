// `kvasir bench`: replaces this process by the program kvasir-bench.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/process.h"
#include "server/commands/commands.h"

namespace kvasir::cli {
namespace {

constexpr char kProgram[] = "kvasir-bench";

// Executes kvasir-bench. Returns, with an exit code, only if that fails.
int Forward(const std::vector<std::string>& arguments) {
  const std::string path = ProgramBeside(kProgram);
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  execvp(path.c_str(), argv.data());
  PrintError(
      "kvasir bench",
      absl::StrCat(kProgram, ": ", std::strerror(errno),
                   "; it was searched for in this program's folder and PATH. "
                   "The benchmarks are a separate program: scripts/build "
                   "kvasir-bench builds it"));
  return kExitFailed;
}

}  // namespace

void AddBenchCommand(CLI::App* app, int* exit_code) {
  CLI::App* command =
      app->add_subcommand("bench",
                          "run benchmarks of this build on this machine "
                          "(kvasir-bench)");
  // All further arguments, even --help, are for kvasir-bench. Without these
  // settings, kvasir itself would parse them.
  command->fallthrough(false);
  command->prefix_command();
  command->set_help_flag();
  command->callback(
      [command, exit_code] { *exit_code = Forward(command->remaining()); });
}

}  // namespace kvasir::cli
