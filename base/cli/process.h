// The set-up and the signals of a program.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvasir::cli {

// Switches off core dumps, which hold prompts, and SIGPIPE; allows as many
// descriptors as possible; sends gRPC's log lines to our log. Call it before
// any thread starts.
void PrepareProcess();

// From now on ShutdownRequested reports the first SIGTERM or SIGINT. Before
// this call, and for the second signal after it, they end the process
// immediately.
void HoldShutdownSignals();
bool ShutdownRequested();

// The path of this program as a person would type it here.
std::string ProgramPath();

// The path of a program of this build, in the folder of the running one; only
// `name` if it is not there, for a search in PATH.
std::string ProgramBeside(const std::string& name);

// TMPDIR, else /tmp.
std::string TemporaryFolder();

// MakePrivateFolder appends this to `parent`; the last letters are random.
inline constexpr std::string_view kPrivateFolderName = "/kvasir-XXXXXX";

// Creates a folder that only this user may enter (mode 0700). UNAVAILABLE with
// the system's reason if that fails.
absl::StatusOr<std::string> MakePrivateFolder(
    const std::string& parent = TemporaryFolder());

// This machine's name, for people.
std::string HostName();

}  // namespace kvasir::cli
