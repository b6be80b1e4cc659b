// What each long-running program sets up before anything else.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace kvasir::cli {

// No core dumps (they hold prompts), no SIGPIPE, gRPC's own log lines through
// ours, SIGTERM and SIGINT held for WaitForShutdown. Call before any thread.
void PrepareProcess();

// Waits for SIGTERM or SIGINT. Returns false when `timeout` passed first.
// Threads: one.
bool WaitForShutdownSignal(absl::Duration timeout);

// Open file descriptors and threads of this process, for leak checks.
int CountOpenDescriptors();
int CountThreads();

}  // namespace kvasir::cli
