// What each long-running program sets up before anything else.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

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

// The path of a program of this build, in the folder of the running one; only
// `name` if it is not there, for a search in PATH.
std::string ProgramBeside(const std::string& name);

// TMPDIR, else /tmp.
std::string TemporaryFolder();

// What MakePrivateFolder appends to `parent`; the last letters are random.
inline constexpr std::string_view kPrivateFolderName = "/kvasir-XXXXXX";

// Creates a folder that only this user may enter (mode 0700). UNAVAILABLE with
// the system's reason if that fails.
absl::StatusOr<std::string> MakePrivateFolder(
    const std::string& parent = TemporaryFolder());

// This machine's name, for people.
std::string HostName();

}  // namespace kvasir::cli
