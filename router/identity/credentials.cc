#include "router/identity/credentials.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "base/sha256.h"

namespace kvasir::router {
namespace {

constexpr absl::string_view kScheme = "bearer ";

// Returns true if the text has the syntax of a bearer token (b64token in RFC
// 6750) and is not too long.
bool IsToken(absl::string_view text) {
  return !text.empty() && text.size() <= kMaxBearerTokenBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::StrContains("-._~+/=", c);
         });
}

}  // namespace

void ReadAuthorization(absl::string_view value, Credentials* credentials) {
  if (value.empty()) return;
  credentials->token = Credentials::Token::kMalformed;
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return;
  value.remove_prefix(kScheme.size());
  if (!IsToken(value)) return;
  credentials->token = Credentials::Token::kGiven;
  credentials->token_sha256 = base::Sha256Hex({value.data(), value.size()});
}

}  // namespace kvasir::router
