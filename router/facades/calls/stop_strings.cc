#include "router/facades/calls/stop_strings.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::router {

absl::Status CheckStopStrings(const std::string& name,
                              const std::vector<std::string>& strings) {
  if (strings.size() > kMaxStopStrings) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": want at most ", kMaxStopStrings,
                     " strings, have ", strings.size()));
  }
  for (const std::string& stop : strings) {
    if (stop.size() <= kMaxStopStringBytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": want strings of at most ", kMaxStopStringBytes,
                     " bytes, have one of ", stop.size(), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status StopAtSpecialTokens(const TextCodec& codec,
                                 bool skip_special_tokens,
                                 std::vector<std::string>* stop_strings,
                                 kvasir::v1::SamplingParams* sampling) {
  std::vector<std::string> strings;
  for (std::string& stop : *stop_strings) {
    if (stop.empty()) continue;
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            codec.EncodeWord(stop));
    if (ids.size() == 1 && codec.IsSpecial(ids[0])) {
      sampling->add_stop_token_ids(ids[0]);
      if (skip_special_tokens) continue;
    }
    strings.push_back(std::move(stop));
  }
  *stop_strings = std::move(strings);
  return absl::OkStatus();
}

}  // namespace kvasir::router
