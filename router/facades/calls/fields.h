// Checks of message fields for vLLM's protocols, with errors that name the
// field, the wanted and the given value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "proto/token_bytes.h"

namespace kvasir::router {

inline constexpr uint32_t kMaxTokenId = std::numeric_limits<int32_t>::max();

// UNIMPLEMENTED: `what` would change the result and is not built.
absl::Status FieldNotBuilt(const std::string& what);

template <typename T>
absl::Status WrongField(const std::string& field, const std::string& want,
                        const T& have) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": want ", want, ", have ", have));
}

// UNIMPLEMENTED, with number and message, if there is a field that this build
// does not know: it may ask for anything.
absl::Status RefuseUnknownFields(const google::protobuf::Message& message);

absl::Status CheckFiniteField(const std::string& field, float value);

// Returns `neutral` for an unset wire value.
inline float OrNeutral(float value, float neutral) {
  return value == 0.0f ? neutral : value;
}

// Clients send the largest number for "all". Returns 0 for all.
inline int32_t TopKOf(uint32_t wire) {
  return wire > kMaxTokenId ? 0 : static_cast<int32_t>(wire);
}

// Returns the prompt's ids. INVALID_ARGUMENT if there are none.
absl::StatusOr<proto::TokenBytes> PromptIdsOf(
    const std::string& field,
    const google::protobuf::RepeatedField<uint32_t>& wire);

absl::Status AddStopIds(const std::string& field,
                        const google::protobuf::RepeatedField<uint32_t>& wire,
                        kvasir::v1::SamplingParams* sampling);

// Abort finds requests by this id, and the access log contains it.
inline constexpr size_t kMaxVllmRequestIdBytes = 256;
absl::Status CheckVllmRequestId(const std::string& id);

}  // namespace kvasir::router
