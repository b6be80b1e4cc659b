// The credentials of a call, before they are checked.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvasir::router {

struct Credentials {
  enum class Token { kNone, kMalformed, kGiven };

  // True if the connection uses TLS.
  bool encrypted = false;
  // The DNS and URI names in the client's certificate, which TLS has verified.
  std::vector<std::string> certificate_names;
  Token token = Token::kNone;
  // The token's SHA-256 as 64 hex digits, if a token was given. The token
  // itself is not kept.
  std::string token_sha256;
};

// The largest size of a token; a longer one counts as malformed.
inline constexpr size_t kMaxBearerTokenBytes = 512;

// Sets the token in `credentials`. `value` is the metadata 'authorization':
// empty if the call has none, and joined by commas if it has several.
void ReadAuthorization(absl::string_view value, Credentials* credentials);

}  // namespace kvasir::router
