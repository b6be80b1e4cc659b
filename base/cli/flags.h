// Command-line flags in one style: each flag is also a KVASIR_* environment
// variable and a key of the --config file; sizes and times have units. A
// "usage error" is a wrong command line, variable or file; it ends the program
// with kExitUsage.
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

// Adds --config. A flag takes precedence over its environment variable, and
// the variable over the file. A key in the file that names no flag is a
// usage error.
void AddConfigFile(CLI::App* app);

// Returns the text of a --config file that sets the flags of `command` to their
// current values.
std::string EffectiveConfig(const CLI::App& command);

// Prints "PROGRAM: WHAT" on standard error, with control characters
// escaped (base::Printable).
void PrintError(const std::string& program, std::string_view what);

// Parses the arguments and runs the command's callback; returns the `exit_code`
// that the callback has set. A usage error is printed and gives kExitUsage;
// --help gives kExitOk.
int ParseAndRun(CLI::App* app, int argc, char** argv, const int& exit_code);

// Returns a validator that reports a usage error if `check` fails for a value.
CLI::Validator Checked(std::function<absl::Status(const std::string&)> check);
// Returns a validator that accepts only numbers in [least, most].
CLI::Validator Between(double least, double most);
CLI::Validator AtLeast(double least);
CLI::Validator Above(double limit);

// Returns the environment variable of a flag: KVASIR_MAX_MODEL_LEN
// for "--max-model-len".
std::string EnvironmentName(const std::string& flag);

// Adds a flag such as "--max-model-len" and its environment variable. --help
// shows the default.
template <typename T>
CLI::Option* AddFlag(CLI::App* app, const std::string& name, T& value,
                     const std::string& help) {
  return app->add_option(name, value, help)
      ->envname(EnvironmentName(name))
      ->capture_default_str();
}

// Makes an empty value of the flag or of its environment variable a usage
// error. CLI11 would treat an empty variable as unset.
void RefuseEmpty(CLI::App* app, CLI::Option* option);

// AddFlag for a text or a list of texts that must not be empty.
template <typename T>
CLI::Option* AddText(CLI::App* app, const std::string& name, T& value,
                     const std::string& help) {
  CLI::Option* const option = AddFlag(app, name, value, help);
  RefuseEmpty(app, option);
  return option;
}

// Adds a flag that needs no value: it sets `value` to true.
CLI::Option* AddSwitch(CLI::App* app, const std::string& name, bool& value,
                       const std::string& help);

// The sizes in bytes that a flag accepts, from `least` to `most`,
// both included.
struct ByteRange {
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
};

// Adds a flag for a size with an optional unit, such as 512MiB
// (see ParseBytes).
CLI::Option* AddBytes(CLI::App* app, const std::string& name, int64_t& value,
                      const std::string& help, ByteRange range = {});

// Adds a flag for a size or the word "auto". If it is "auto", `value` is empty.
CLI::Option* AddBytesOrAuto(CLI::App* app, const std::string& name,
                            std::optional<int64_t>& value,
                            const std::string& help);

// Adds a flag for a time with its unit: 500ms, 30s, 5m. Numbers without a unit
// are refused.
CLI::Option* AddDuration(CLI::App* app, const std::string& name,
                         absl::Duration& value, const std::string& help);

}  // namespace kvasir::cli
