// The subcommands of kvasir-bench. Each Add function declares one and sets a
// callback that stores the exit code.
#pragma once

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

void AddBenchAttention(CLI::App* group, int* exit_code);
void AddBenchCapacity(CLI::App* group, int* exit_code);
void AddBenchDecode(CLI::App* group, int* exit_code);
void AddBenchPrefill(CLI::App* group, int* exit_code);
void AddBenchProxy(CLI::App* group, int* exit_code);
void AddBenchRouter(CLI::App* group, int* exit_code);
void AddBenchScheduler(CLI::App* group, int* exit_code);
void AddBenchServe(CLI::App* group, int* exit_code);
void AddBenchLoad(CLI::App* group, int* exit_code);

}  // namespace kvasir::cli
