// The commands of kvasir-compress, each in a .cc file of its own, and the
// functions that they share.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

// After this call the first SIGINT or SIGTERM only makes StopAsked return true;
// a second one ends the process immediately.
void HoldStopSignals();
bool StopAsked();

// If `status` is an error, prints its text to standard error and sets the exit
// code.
void Report(const absl::Status& status, int* exit_code);

// Adds the flag --device, whose value is passed to compress::OpenDevice.
void AddDeviceFlag(CLI::App* command, std::string& device);

void AddApplyCommand(CLI::App* app, int* exit_code);
void AddCalibrateCommand(CLI::App* app, int* exit_code);
void AddEvaluateCommand(CLI::App* app, int* exit_code);
void AddInitCommand(CLI::App* app, int* exit_code);
void AddPlanCommand(CLI::App* app, int* exit_code);
void AddRecoverCommand(CLI::App* app, int* exit_code);

}  // namespace kvasir::cli
