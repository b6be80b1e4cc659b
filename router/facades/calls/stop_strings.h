// Stop strings as clients send them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// Every stop string is searched for in each new token's text.
inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopStringBytes = 1 << 10;

// INVALID_ARGUMENT if the strings exceed the limits; `name` is the client's
// name of the field.
absl::Status CheckStopStrings(const std::string& name,
                              const std::vector<std::string>& strings);

// Replaces stop strings that are special tokens by their ids, because such a
// token never appears in the text.
absl::Status StopAtSpecialTokens(const TextCodec& codec,
                                 bool skip_special_tokens,
                                 std::vector<std::string>* stop_strings,
                                 kvasir::v1::SamplingParams* sampling);

}  // namespace kvasir::router
