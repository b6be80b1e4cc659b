// Checks stop strings as clients send them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// The most stop strings in a request. It is limited because each token's text
// is searched for every one of them.
inline constexpr size_t kMaxStopStrings = 64;
inline constexpr size_t kMaxStopStringBytes = 1 << 10;

// Returns INVALID_ARGUMENT if the strings exceed the limits; `name` is the
// protocol's name of the field.
absl::Status CheckStopStrings(const std::string& name,
                              const std::vector<std::string>& strings);

// Adds a stop id for each stop string that is a special token. If
// skip_special_tokens is set, also removes such a string, because the output
// text has no special tokens and it would never match. Removes empty strings.
absl::Status StopAtSpecialTokens(const TextCodec& codec,
                                 bool skip_special_tokens,
                                 std::vector<std::string>* stop_strings,
                                 kvasir::v1::SamplingParams* sampling);

}  // namespace kvasir::router
