// Command-line flags in one style: each is also a KVASIR_* environment variable
// and a key of the --config file, sizes and times take units.
#pragma once

#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/time/time.h"

namespace kvasir::cli {

// Exit codes that scripts can trust.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // it ran and failed, or could not start
  kExitUsage = 2,        // the command line or a config file is wrong
  kExitUnavailable = 3,  // no server there, or it is draining or full
};

// KVASIR_MAX_MODEL_LEN for "--max-model-len".
std::string EnvironmentName(const std::string& flag);

// "--name" with its environment variable; the default is shown in --help.
template <typename T>
CLI::Option* AddFlag(CLI::App* app, const std::string& name, T& value,
                     const std::string& help) {
  return app->add_option(name, value, help)
      ->envname(EnvironmentName(name))
      ->capture_default_str();
}

// A switch.
CLI::Option* AddSwitch(CLI::App* app, const std::string& name, bool& value,
                       const std::string& help);

// Bytes with an optional binary unit: 1048576, 512MiB, 2G.
CLI::Option* AddBytes(CLI::App* app, const std::string& name, int64_t& value,
                      const std::string& help);

// A time with its unit: 500ms, 30s, 5m. Plain numbers are refused: of what?
CLI::Option* AddDuration(CLI::App* app, const std::string& name,
                         absl::Duration& value, const std::string& help);

// "1.5 GiB".
std::string HumanBytes(double bytes);

}  // namespace kvasir::cli
