// kvasir: the server and its tools.
#include "CLI/CLI.hpp"
#include "base/cli/flags.h"
#include "base/cli/process.h"
#include "base/cli/version.h"
#include "server/commands/commands.h"

int main(int argc, char** argv) {
  using namespace kvasir::cli;
  PrepareProcess();

  CLI::App app{
      "Kvasir: an LLM serving backend whose KV cache is stored compressed."};
  app.name("kvasir");
  app.set_version_flag("--version", std::string(kVersion));
  AddConfigFile(&app);
  app.fallthrough();
  app.require_subcommand(1);
  app.footer(
      "Every flag can also be set as an environment variable: "
      "--max-queue is\nKVASIR_MAX_QUEUE. Precedence: flag, "
      "environment, config file.\nExit codes: 0 success, 1 "
      "failure, 2 wrong usage, 3 no server answers.");

  int exit_code = kExitOk;
  AddServeCommand(&app, &exit_code);
  AddWorkerCommand(&app, &exit_code);
  AddRankCommand(&app, &exit_code);
  AddRouterCommand(&app, &exit_code);
  AddGenerateCommand(&app, &exit_code);
  AddPerplexityCommand(&app, &exit_code);
  AddCheckPlanCommand(&app, &exit_code);
  AddInspectCommand(&app, &exit_code);
  AddConvertCommand(&app, &exit_code);
  AddBenchCommand(&app, &exit_code);
  AddDrainCommand(&app, &exit_code);
  AddTokenCommand(&app, &exit_code);

  return ParseAndRun(&app, argc, argv, exit_code);
}
