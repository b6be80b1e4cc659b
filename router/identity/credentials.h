// A call's credentials, before they are checked.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvasir::router {

struct Credentials {
  enum class Token { kNone, kMalformed, kGiven };

  // The connection is TLS.
  bool encrypted = false;
  // DNS and URI names of a certificate that TLS has verified.
  std::vector<std::string> certificate_names;
  Token token = Token::kNone;
  // 64 hex digits, if a token was given. The token itself is not kept.
  std::string token_sha256;
};

// Longer tokens are malformed.
inline constexpr size_t kMaxBearerTokenBytes = 512;

// Sets the token from the value of metadata 'authorization'. Values of a
// repeated key are joined by commas; empty: there was none.
void ReadAuthorization(absl::string_view value, Credentials* credentials);

}  // namespace kvasir::router
