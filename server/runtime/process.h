// What each long-running program sets up before anything else.
#pragma once

#include <string>

namespace kvasir::cli {

// No core dumps (they hold prompts), no SIGPIPE, as many descriptors as may be,
// gRPC's own log lines through ours. Call before any thread.
void PrepareProcess();

// From now on SIGTERM and SIGINT are kept for ShutdownRequested; before, and
// for the second one after, they end the process at once.
void HoldShutdownSignals();
bool ShutdownRequested();

// The path of this program as a person would type it here.
std::string ProgramPath();

}  // namespace kvasir::cli
