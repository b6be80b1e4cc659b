// The commands of kvasir-compress, one file each, and what they share.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

// From now on SIGINT and SIGTERM are kept for StopAsked; the second one ends
// the process at once.
void HoldStopSignals();
bool StopAsked();

// The reason on standard error and an exit code, unless all is well.
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
