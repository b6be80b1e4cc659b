// The program kvasir-compress, which compresses checkpoints offline.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "CLI/CLI.hpp"
#include "base/cli/flags.h"
#include "base/cli/version.h"
#include "base/string_view.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/tool/commands.h"

namespace kvasir::cli {
namespace {

volatile sig_atomic_t g_stop_signals = 0;

void OnStopSignal(int signal_number) {
  // A second signal ends the process immediately. The state is then not saved.
  if (g_stop_signals > 0) _exit(128 + signal_number);
  g_stop_signals = 1;
}

int Main(int argc, char** argv) {
  compress::UseBestBlasKernels(argv);
  HoldStopSignals();

  CLI::App app{
      "kvasir-compress: makes checkpoints and compresses them, offline."};
  app.name("kvasir-compress");
  app.set_version_flag("--version", std::string(kVersion));
  AddConfigFile(&app);
  app.fallthrough();
  app.require_subcommand(1);
  app.footer(
      "Every flag can also be set as an environment variable: "
      "--max-shard-bytes is\nKVASIR_MAX_SHARD_BYTES.\n"
      "Ctrl-C stops the program and saves what a later run can continue from; "
      "pressed\ntwice, it ends the program at once.\n"
      "Exit codes: 0 done, 1 failed or stopped, 2 wrong usage.");
  int exit_code = kExitOk;
  AddCalibrateCommand(&app, &exit_code);
  AddPlanCommand(&app, &exit_code);
  AddApplyCommand(&app, &exit_code);
  AddEvaluateCommand(&app, &exit_code);
  AddRecoverCommand(&app, &exit_code);
  AddInitCommand(&app, &exit_code);
  return ParseAndRun(&app, argc, argv, exit_code);
}

}  // namespace

void HoldStopSignals() {
  struct sigaction action = {};
  action.sa_handler = OnStopSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

bool StopAsked() { return g_stop_signals > 0; }

void AddDeviceFlag(CLI::App* command, std::string& device) {
  AddFlag(command, "--device", device,
          "auto, cpu or cuda; auto: a GPU if there is one that the libtorch "
          "of this program can use")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

void Report(const absl::Status& status, int* exit_code) {
  if (status.ok()) return;
  PrintError("kvasir-compress", base::StdView(status.message()));
  *exit_code = kExitFailed;
}

}  // namespace kvasir::cli

int main(int argc, char** argv) {
  try {
    return kvasir::cli::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvasir-compress: %s\n", error.what());
    return 1;
  }
}
