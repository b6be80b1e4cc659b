// Command-line flags in one style: each is also a KVASIR_* environment variable
// and a key of the --config file, sizes and times take units.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/cli/exit_code.h"

namespace kvasir::cli {

// --config with the precedence flag, environment, file. A key of the file that
// is no flag is wrong usage.
void AddConfigFile(CLI::App* app);

// What is in force in `command`, as a file for --config.
std::string EffectiveConfig(const CLI::App& command);

// "kvasir inspect: ..." on standard error, base::Printable.
void PrintError(const std::string& program, std::string_view what);

// Parses, and runs the command's callback. kExitOk, kExitUsage with the reason
// on standard error, or what the callback has put into `exit_code`.
int ParseAndRun(CLI::App* app, int argc, char** argv, const int& exit_code);

// Wrong usage where `check` fails for the flag's text.
CLI::Validator Checked(std::function<absl::Status(const std::string&)> check);
// Wrong usage for what is no number between the two, both included.
CLI::Validator Between(double least, double most);
CLI::Validator AtLeast(double least);
CLI::Validator Above(double limit);

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

// Wrong usage for "" as this app's flag, or as its variable, which the library
// would take for one that is not set.
void RefuseEmpty(CLI::App* app, CLI::Option* option);

// AddFlag of what means something else, or less, where it is empty.
template <typename T>
CLI::Option* AddText(CLI::App* app, const std::string& name, T& value,
                     const std::string& help) {
  CLI::Option* const option = AddFlag(app, name, value, help);
  RefuseEmpty(app, option);
  return option;
}

// A switch.
CLI::Option* AddSwitch(CLI::App* app, const std::string& name, bool& value,
                       const std::string& help);

// Both included.
struct ByteRange {
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
};

// Bytes as ParseBytes reads them.
CLI::Option* AddBytes(CLI::App* app, const std::string& name, int64_t& value,
                      const std::string& help, ByteRange range = {});

// The same, or "auto": empty.
CLI::Option* AddBytesOrAuto(CLI::App* app, const std::string& name,
                            std::optional<int64_t>& value,
                            const std::string& help);

// A time with its unit: 500ms, 30s, 5m. Plain numbers are refused: of what?
CLI::Option* AddDuration(CLI::App* app, const std::string& name,
                         absl::Duration& value, const std::string& help);

}  // namespace kvasir::cli
