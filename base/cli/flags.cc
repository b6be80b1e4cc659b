#include "base/cli/flags.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/cli/units.h"
#include "base/log.h"

namespace kvasir::cli {
namespace {

// Gives environment variables precedence over the --config file. CLI11 itself
// applies the file first, and then ignores the variables of options that the
// file has set.
class ConfigBelowEnvironment final : public CLI::ConfigTOML {
 public:
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> read = CLI::ConfigTOML::from_config(input);
    std::erase_if(read, [](const CLI::ConfigItem& item) {
      // "++" and "--" begin and end a section.
      if (item.name.find_first_not_of("+-") == std::string::npos) return false;
      const char* value =
          std::getenv(EnvironmentName("--" + item.name).c_str());
      return value != nullptr && *value != '\0';
    });
    return read;
  }
};

// CLI11 reads no escapes in texts, so a text with both kinds of quotes cannot
// be written.
bool HasTomlValue(const std::string& text) {
  return !absl::StrContains(text, '\'') ||
         text.find_first_of("\"\\") == std::string::npos;
}
// Returns `text` as a TOML value. Numbers and truth values get no quotes. Texts
// with a double quote or a backslash get single quotes, others double ones.
// Requires HasTomlValue.
std::string TomlValue(const std::string& text) {
  double number = 0;
  if (text == "true" || text == "false" ||
      (absl::SimpleAtod(text, &number) && !absl::StartsWith(text, "+"))) {
    return text;
  }
  const bool literal = text.find_first_of("\"\\") != std::string::npos;
  const char* quote = literal ? "'" : "\"";
  return absl::StrCat(quote, text, quote);
}

std::string TomlValue(const std::vector<std::string>& values) {
  std::vector<std::string> quoted;
  for (const std::string& value : values) quoted.push_back(TomlValue(value));
  return absl::StrCat("[", absl::StrJoin(quoted, ", "), "]");
}

// Returns "64MiB" for 64 << 20: uses the largest unit that divides the size, so
// that ParseBytes returns the same number.
std::string ExactBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes > 0 && bytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

CLI::Validator NumberCheck(std::function<bool(double)> good,
                           const std::string& want) {
  return CLI::Validator(
      [good = std::move(good), want](std::string& text) {
        double number = 0;
        if (absl::SimpleAtod(text, &number) && good(number)) {
          return std::string();
        }
        return absl::StrCat("'", text, "' is not a number ", want);
      },
      "", "");
}

constexpr char kNotEmpty[] = "not empty";

bool IsRefusedEmpty(CLI::Option* option) {
  try {
    return option->get_validator(kNotEmpty) != nullptr;
  } catch (const CLI::OptionNotFound&) {
    return false;
  }
}

// Returns a message for `error`. For an unknown key or command it says more
// than CLI11's own message.
std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error) {
  constexpr char kUnknownKey[] = "INI was not able to parse ";
  const std::string text = error.what();
  if (absl::StartsWith(text, kUnknownKey)) {
    return absl::StrCat("--config: '",
                        absl::StripSuffix(text.substr(sizeof kUnknownKey - 1),
                                          // CLI11's suffix for a section
                                          ".++"),
                        "' is not a flag; keys are flag names, in a section "
                        "named after the command");
  }
  const std::vector<std::string> words = app.remaining(true);
  if (error.get_name() == "RequiredError" && !words.empty() &&
      absl::StrContains(text, "subcommand")) {
    return absl::StrCat("'", words.front(), "' is not a command");
  }
  return text;
}

}  // namespace

void AddConfigFile(CLI::App* app) {
  app->config_formatter(std::make_shared<ConfigBelowEnvironment>());
  app->set_config(
      "--config", "",
      "TOML or INI file; keys are flag names, sections are subcommands");
  app->allow_config_extras(CLI::config_extras_mode::error);
}

std::string EffectiveConfig(const CLI::App& command) {
  std::string config = absl::StrCat("[", command.get_name(), "]\n");
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_configurable() || option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    const std::vector<std::string>& given = option->results();
    const bool is_flag = option->get_expected_min() == 0;
    if (!std::all_of(given.begin(), given.end(), HasTomlValue)) {
      absl::StrAppend(&config, "# ", name,
                      " cannot be written here, because it has both kinds of "
                      "quotes; pass --",
                      name, " again\n");
      continue;
    }
    if (is_flag && given.empty() && option->get_default_str().empty()) {
      absl::StrAppend(&config, name, "=false\n");
    } else if (option->get_expected_max() > 1 && !given.empty()) {
      absl::StrAppend(&config, name, "=", TomlValue(given), "\n");
    } else {
      const std::string value =
          given.empty() ? option->get_default_str() : given.back();
      // An empty list would be printed as "[]", which cannot be read back.
      if (value.empty() || value == "[]") {
        absl::StrAppend(&config, "# ", name, " is not set\n");
      } else {
        absl::StrAppend(&config, name, "=", TomlValue(value), "\n");
      }
    }
  }
  return config;
}

void PrintError(const std::string& program, std::string_view what) {
  std::fprintf(stderr, "%s: %s\n", program.c_str(),
               base::Printable(what).c_str());
}

int ParseAndRun(CLI::App* app, int argc, char** argv, const int& exit_code) {
  try {
    app->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 reports --help and --version as errors with exit code 0.
    if (error.get_exit_code() == 0) return app->exit(error);
    PrintError(app->get_name(), UsageMessage(*app, error) +
                                    "\nRun with --help for more information.");
    return kExitUsage;
  } catch (const std::exception& error) {
    PrintError(app->get_name(), error.what());
    return kExitFailed;
  }
  return exit_code;
}

CLI::Validator Checked(std::function<absl::Status(const std::string&)> check) {
  return CLI::Validator(
      [check = std::move(check)](std::string& text) {
        return std::string(check(text).message());
      },
      "", "");
}

CLI::Validator Between(double least, double most) {
  return NumberCheck(
      [=](double number) { return number >= least && number <= most; },
      absl::StrCat("from ", least, " to ", most));
}

CLI::Validator AtLeast(double least) {
  constexpr double kMost = std::numeric_limits<double>::max();
  return NumberCheck(
      [=](double number) { return number >= least && number <= kMost; },
      absl::StrCat("of at least ", least, " and below infinity"));
}

CLI::Validator Above(double limit) {
  constexpr double kMost = std::numeric_limits<double>::max();
  return NumberCheck(
      [=](double number) { return number > limit && number <= kMost; },
      absl::StrCat("above ", limit, " and below infinity"));
}

void RefuseEmpty(CLI::App* app, CLI::Option* option) {
  CLI::Validator validator = Checked([](const std::string& text) {
    return text.empty()
               ? absl::InvalidArgumentError(
                     "the value is empty: omit the flag or give it a value")
               : absl::OkStatus();
  });
  option->check(validator.name(kNotEmpty));
  app->preparse_callback([app](size_t) {
    for (CLI::Option* each : app->get_options()) {
      const std::string variable = each->get_envname();
      const char* const value =
          variable.empty() ? nullptr : std::getenv(variable.c_str());
      // A list that has only commas counts as empty.
      const bool empty =
          value != nullptr && std::string_view(value).find_first_not_of(',') ==
                                  std::string_view::npos;
      if (!empty || !IsRefusedEmpty(each)) continue;
      throw CLI::ValidationError(
          variable, "is set and empty: unset it or give it a value");
    }
  });
}

std::string EnvironmentName(const std::string& flag) {
  std::string name = "KVASIR_" + flag.substr(flag.find_first_not_of('-'));
  for (char& c : name) {
    c = c == '-'
            ? '_'
            : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

CLI::Option* AddSwitch(CLI::App* app, const std::string& name, bool& value,
                       const std::string& help) {
  return app->add_flag(name, value, help)->envname(EnvironmentName(name));
}

CLI::Option* AddBytes(CLI::App* app, const std::string& name, int64_t& value,
                      const std::string& help, ByteRange range) {
  return app
      ->add_option_function<std::string>(
          name,
          [&value, name, range](const std::string& text) {
            int64_t parsed = 0;
            const absl::Status status = ParseBytes(text, &parsed);
            if (!status.ok()) {
              throw CLI::ValidationError(name, std::string(status.message()));
            }
            if (parsed < range.least || parsed > range.most) {
              throw CLI::ValidationError(
                  name, absl::StrCat("'", text, "' is not a size from ",
                                     ExactBytes(range.least), " to ",
                                     ExactBytes(range.most)));
            }
            value = parsed;
          },
          help)
      ->envname(EnvironmentName(name))
      ->default_str(ExactBytes(value))
      ->type_name("BYTES");
}

CLI::Option* AddBytesOrAuto(CLI::App* app, const std::string& name,
                            std::optional<int64_t>& value,
                            const std::string& help) {
  return app
      ->add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            int64_t parsed = 0;
            if (text == "auto") {
              value.reset();
              return;
            }
            const absl::Status status = ParseBytes(text, &parsed);
            if (!status.ok()) {
              throw CLI::ValidationError(
                  name,
                  absl::StrCat(status.message(), "; auto is allowed, too"));
            }
            value = parsed;
          },
          help)
      ->envname(EnvironmentName(name))
      ->default_str(value.has_value() ? ExactBytes(*value) : "auto")
      ->type_name("BYTES|auto");
}

CLI::Option* AddDuration(CLI::App* app, const std::string& name,
                         absl::Duration& value, const std::string& help) {
  return app
      ->add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            absl::Duration parsed;
            if (!absl::ParseDuration(text, &parsed) ||
                parsed < absl::ZeroDuration()) {
              throw CLI::ValidationError(name,
                                         "'" + text +
                                             "' is not a duration of at least "
                                             "0, such as 500ms or 30s");
            }
            value = parsed;
          },
          help)
      ->envname(EnvironmentName(name))
      ->default_str(absl::FormatDuration(value))
      ->type_name("DURATION");
}

}  // namespace kvasir::cli
