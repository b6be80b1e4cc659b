// Strings that end a sample, as clients give them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// Every stop string is searched for in every new token's text.
inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopStringBytes = 1 << 10;

// INVALID_ARGUMENT beyond these; `name`: what the client called them.
absl::Status CheckStopStrings(const std::string& name,
                              const std::vector<std::string>& strings);

// A stop string that is the name of a special token never shows in the text:
// its id stops instead.
absl::Status StopAtSpecialTokens(const TextCodec& codec,
                                 bool skip_special_tokens,
                                 std::vector<std::string>* stop_strings,
                                 kvasir::v1::SamplingParams* sampling);

}  // namespace kvasir::router
