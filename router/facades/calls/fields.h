// Checks of message fields for vLLM's protocols. The errors name the field, the
// allowed values and the given value.
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

// Returns the error (UNIMPLEMENTED) for a request that asks for `what`. Kvasir
// does not implement it, and ignoring it would change the result.
absl::Status FieldNotBuilt(const std::string& what);

template <typename T>
absl::Status WrongField(const std::string& field, const std::string& want,
                        const T& have) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": want ", want, ", have ", have));
}

// Returns UNIMPLEMENTED, with the field's number and the name of its message,
// if the message contains a field that this build does not know. Such a field
// may ask for something that changes the result.
absl::Status RefuseUnknownFields(const google::protobuf::Message& message);

absl::Status CheckFiniteField(const std::string& field, float value);

// Returns `value`, or `neutral` if it is 0, which stands for an unset field.
inline float OrNeutral(float value, float neutral) {
  return value == 0.0f ? neutral : value;
}

// Converts a client's top_k. vLLM's clients send the largest uint32 for "all
// tokens", which is 0 here. Other values above int32 count as "all tokens" too.
inline int32_t TopKOf(uint32_t wire) {
  return wire > kMaxTokenId ? 0 : static_cast<int32_t>(wire);
}

// Returns the prompt's ids. INVALID_ARGUMENT if the list is empty.
absl::StatusOr<proto::TokenBytes> PromptIdsOf(
    const std::string& field,
    const google::protobuf::RepeatedField<uint32_t>& wire);

absl::Status AddStopIds(const std::string& field,
                        const google::protobuf::RepeatedField<uint32_t>& wire,
                        kvasir::v1::SamplingParams* sampling);

// The largest size of a request's id. Abort looks requests up by this id, and
// the access log contains it.
inline constexpr size_t kMaxVllmRequestIdBytes = 256;
absl::Status CheckVllmRequestId(const std::string& id);

}  // namespace kvasir::router
