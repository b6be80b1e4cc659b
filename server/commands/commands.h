// The subcommands of `kvasir`. Each Add function declares the
// flags of its subcommand and sets a callback that stores the exit
// code (base/cli/exit_code.h).
#pragma once

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

void AddServeCommand(CLI::App* app, int* exit_code);
void AddWorkerCommand(CLI::App* app, int* exit_code);
void AddRankCommand(CLI::App* app, int* exit_code);
void AddRouterCommand(CLI::App* app, int* exit_code);
void AddGenerateCommand(CLI::App* app, int* exit_code);
void AddPerplexityCommand(CLI::App* app, int* exit_code);
void AddCheckPlanCommand(CLI::App* app, int* exit_code);
void AddConvertCommand(CLI::App* app, int* exit_code);
void AddInspectCommand(CLI::App* app, int* exit_code);
void AddBenchCommand(CLI::App* app, int* exit_code);
void AddDrainCommand(CLI::App* app, int* exit_code);
void AddTokenCommand(CLI::App* app, int* exit_code);

}  // namespace kvasir::cli
