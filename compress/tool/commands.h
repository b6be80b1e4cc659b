// The commands of kvasir-compress, one file each, and the functions that they
// share.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

// From now on StopAsked reports the first SIGINT or SIGTERM; a second one ends
// the process immediately.
void HoldStopSignals();
bool StopAsked();

// If `status` is an error: prints the reason on standard error and sets an exit
// code.
void Report(const absl::Status& status, int* exit_code);

// --device, for compress::OpenDevice.
void AddDeviceFlag(CLI::App* command, std::string& device);

void AddApplyCommand(CLI::App* app, int* exit_code);
void AddCalibrateCommand(CLI::App* app, int* exit_code);
void AddEvaluateCommand(CLI::App* app, int* exit_code);
void AddInitCommand(CLI::App* app, int* exit_code);
void AddPlanCommand(CLI::App* app, int* exit_code);
void AddRecoverCommand(CLI::App* app, int* exit_code);

}  // namespace kvasir::cli
