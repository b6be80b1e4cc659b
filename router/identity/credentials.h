// What a call shows of who makes it, before anybody has judged it.
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
  // Where one is given: 64 hex digits. The token itself is not kept.
  std::string token_sha256;
};

// Longer ones are malformed.
inline constexpr size_t kMaxBearerTokenBytes = 512;

// Sets the token by the value of metadata 'authorization', values of a repeated
// key joined by commas; empty: there was none.
void ReadAuthorization(absl::string_view value, Credentials* credentials);

}  // namespace kvasir::router
