// `kvasir token`: creates a token for a client, and the token's entry for the
// file of --identities.
#include <sys/random.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/cli/flags.h"
#include "base/sha256.h"
#include "nlohmann/json.hpp"
#include "router/identity/identities.h"
#include "server/commands/commands.h"

namespace kvasir::cli {
namespace {

struct TokenFlags {
  std::string label = "token";
  absl::Duration valid_for = absl::ZeroDuration();
  bool json = false;
};

// The longest validity. It is limited so that years in dates have four digits.
constexpr absl::Duration kMaxValidFor = absl::Hours(24 * 365 * 100);

absl::Status CheckValidFor(const std::string& text) {
  absl::Duration valid_for;
  // The flag's own parser refuses a text that is not a duration.
  if (!absl::ParseDuration(text, &valid_for) || valid_for <= kMaxValidFor) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the validity '", text, "' is too long: give at most ",
      absl::FormatDuration(kMaxValidFor), " (100 years), or 0 for no end"));
}

// Returns a token of 256 random bits, written as letters, digits, - and _.
std::string NewToken() {
  std::array<char, 32> bytes;
  KVASIR_CHECK(getrandom(bytes.data(), bytes.size(), 0) ==
               static_cast<ssize_t>(bytes.size()));
  std::string token;
  absl::WebSafeBase64Escape(absl::string_view(bytes.data(), bytes.size()),
                            &token);
  return token;
}

void PrintToken(const TokenFlags& flags) {
  const std::string token = NewToken();
  nlohmann::ordered_json entry{{"label", flags.label},
                               {"sha256", base::Sha256Hex(token)}};
  if (flags.valid_for > absl::ZeroDuration()) {
    entry["not_after"] =
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + flags.valid_for,
                         absl::UTCTimeZone());
  }
  if (flags.json) {
    std::printf("%s\n",
                nlohmann::ordered_json{{"token", token}, {"entry", entry}}
                    .dump()
                    .c_str());
    return;
  }
  std::printf(
      "%s\n\nThat is the token for the client; it cannot be "
      "shown again. Add this entry to a tenant's\n\"tokens\" "
      "in the file of --identities:\n\n%s\n",
      token.c_str(), entry.dump().c_str());
}

}  // namespace

void AddTokenCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<TokenFlags>();
  CLI::App* command = app->add_subcommand(
      "token",
      "make a random token for a client, and its entry for the file "
      "of --identities");
  AddFlag(command, "--label", flags->label,
          "the token's name in logs: letters, digits and -_.:@/")
      ->check(Checked([](const std::string& text) {
        return router::CheckTokenLabel(text);
      }));
  AddDuration(command, "--valid-for", flags->valid_for,
              "how long the token is valid (2160h: 90 days); 0: no end")
      ->check(Checked(CheckValidFor));
  AddSwitch(command, "--json", flags->json,
            "print a JSON object with the token and the entry");
  command->callback([flags, exit_code] {
    PrintToken(*flags);
    *exit_code = kExitOk;
  });
}

}  // namespace kvasir::cli
