// Functions that every program needs: to prepare the process at its start
// (limits, signals, gRPC's log), to notice a request to shut down, and to find
// paths and names in its environment.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// Disables SIGPIPE and core dumps (a dump would contain prompts), raises the
// limit of open descriptors as far as possible, and sends gRPC's log lines to
// our log. Call it before any thread starts.
void PrepareProcess();

// From now on, the first SIGTERM or SIGINT is only reported by
// ShutdownRequested; a second one ends the process immediately.
void HoldShutdownSignals();
bool ShutdownRequested();

// Returns the path of this program as a person would type it in the
// current folder.
std::string ProgramPath();

// Returns the path of another program of this build: `name` in the folder of
// the running program. If it is not there, returns only `name`, so that the
// system searches PATH.
std::string ProgramBeside(const std::string& name);

// Returns the value of TMPDIR, or /tmp if it is not set.
std::string TemporaryFolder();

// MakePrivateFolder appends this to `parent`; the last letters are random.
inline constexpr std::string_view kPrivateFolderName = "/kvasir-XXXXXX";

// Creates a folder that only this user may enter (mode 0700). A hidden file in
// it stays locked until this process ends. First removes folders in `parent`
// that ended processes of this user have left there, for example after
// SIGKILL. UNAVAILABLE with the system's reason if the folder cannot be
// created.
absl::StatusOr<std::string> MakePrivateFolder(
    const std::string& parent = TemporaryFolder());

// Returns this machine's name, for messages to people.
std::string HostName();

}  // namespace kvasir::cli
