#include "base/cli/units.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvasir::cli {

absl::Status ParseBytes(const std::string& text, int64_t* bytes) {
  constexpr char kUnits[] = "bkmgtpe";
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const size_t digits =
      std::min(text.find_first_not_of("0123456789"), text.size());
  const size_t letters =
      std::min(text.find_first_not_of(' ', digits), text.size());
  const std::string unit = letters == text.size()
                               ? std::string(1, kUnits[0])
                               : absl::AsciiStrToLower(text.substr(letters));
  const size_t power = std::string_view(kUnits).find(unit.front());
  const bool known =
      power != std::string_view::npos &&
      (unit.size() == 1 ||
       (power > 0 && (unit.substr(1) == "b" || unit.substr(1) == "ib")));
  if (digits == 0 || !known) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text, "' is not a size such as 1048576, 512MiB or 2G"));
  }
  int64_t number = 0;
  if (!absl::SimpleAtoi(text.substr(0, digits), &number) ||
      number > kMost >> (10 * power)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is over the limit of ", kMost, " bytes"));
  }
  *bytes = number << (10 * power);
  return absl::OkStatus();
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
