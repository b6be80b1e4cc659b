// The exit codes of commands.
#pragma once

namespace kvasir::cli {

// Scripts rely on these codes.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the command ran and failed, or could not start
  kExitUsage = 2,        // the command line or a config file is wrong
  kExitUnavailable = 3,  // no server answers, or it is draining or full
};

}  // namespace kvasir::cli
