#include "cli/flags.h"

#include <algorithm>
#include <cctype>

#include "absl/strings/str_format.h"

namespace kvasir::cli {

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
                      const std::string& help) {
  return app->add_option(name, value, help)
      ->envname(EnvironmentName(name))
      ->check(CLI::NonNegativeNumber)
      ->transform(CLI::AsSizeValue(false))
      ->default_str(HumanBytes(static_cast<double>(value)));
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
              throw CLI::ValidationError(
                  name, "'" + text + "' is no duration: want e.g. 500ms, 30s");
            }
            value = parsed;
          },
          help)
      ->envname(EnvironmentName(name))
      ->default_str(absl::FormatDuration(value))
      ->type_name("DURATION");
}

std::string HumanBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes)
                   : absl::StrFormat("%.2f %s", bytes, kUnits[unit]);
}

}  // namespace kvasir::cli
