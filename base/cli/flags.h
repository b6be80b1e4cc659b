// Command-line flags in one style: each is also a KVASIR_* environment variable
// and a key of the --config file, and sizes and times have units.
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

// Adds --config. The precedence is flag, environment, file. A key of the file
// that is no flag is wrong usage.
void AddConfigFile(CLI::App* app);

// The configuration that is in force in `command`, as a file for --config.
std::string EffectiveConfig(const CLI::App& command);

// Prints "kvasir inspect: ..." on standard error, as base::Printable.
void PrintError(const std::string& program, std::string_view what);

// Parses the arguments and runs the command's callback. Returns kExitOk,
// kExitUsage with the reason on standard error, or the value that the callback
// has put into `exit_code`.
int ParseAndRun(CLI::App* app, int argc, char** argv, const int& exit_code);

// A value is wrong usage if `check` fails for its text.
CLI::Validator Checked(std::function<absl::Status(const std::string&)> check);
// A value is wrong usage if it is no number in [least, most].
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

// Makes "" wrong usage for the flag and for its variable. The library would
// treat an empty variable as unset.
void RefuseEmpty(CLI::App* app, CLI::Option* option);

// AddFlag for a text that must not be empty.
template <typename T>
CLI::Option* AddText(CLI::App* app, const std::string& name, T& value,
                     const std::string& help) {
  CLI::Option* const option = AddFlag(app, name, value, help);
  RefuseEmpty(app, option);
  return option;
}

// Adds a switch.
CLI::Option* AddSwitch(CLI::App* app, const std::string& name, bool& value,
                       const std::string& help);

// Both ends are included.
struct ByteRange {
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
};

// Adds a number of bytes, as ParseBytes reads it.
CLI::Option* AddBytes(CLI::App* app, const std::string& name, int64_t& value,
                      const std::string& help, ByteRange range = {});

// Adds a number of bytes, or "auto" for an empty value.
CLI::Option* AddBytesOrAuto(CLI::App* app, const std::string& name,
                            std::optional<int64_t>& value,
                            const std::string& help);

// Adds a time with its unit: 500ms, 30s, 5m. Numbers without a unit are
// refused.
CLI::Option* AddDuration(CLI::App* app, const std::string& name,
                         absl::Duration& value, const std::string& help);

}  // namespace kvasir::cli
