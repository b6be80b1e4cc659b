// A message's fields as clients send them: what is refused, and how its error
// names field, want and have. For the protocols of vLLM, whose words are alike.
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

// UNIMPLEMENTED: `what` would change the result, and is not built.
absl::Status FieldNotBuilt(const std::string& what);

template <typename T>
absl::Status WrongField(const std::string& field, const std::string& want,
                        const T& have) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": want ", want, ", have ", have));
}

// A field that this build has no name for may ask for anything: UNIMPLEMENTED
// by number and message.
absl::Status RefuseUnknownFields(const google::protobuf::Message& message);

absl::Status CheckFiniteField(const std::string& field, float value);

// A wire value where it is set, `neutral` where it is zero.
inline float OrNeutral(float value, float neutral) {
  return value == 0.0f ? neutral : value;
}

// Clients send the largest number for "all"; 0: all.
inline int32_t TopKOf(uint32_t wire) {
  return wire > kMaxTokenId ? 0 : static_cast<int32_t>(wire);
}

// A prompt of ids, at least one.
absl::StatusOr<proto::TokenBytes> PromptIdsOf(
    const std::string& field,
    const google::protobuf::RepeatedField<uint32_t>& wire);

absl::Status AddStopIds(const std::string& field,
                        const google::protobuf::RepeatedField<uint32_t>& wire,
                        kvasir::v1::SamplingParams* sampling);

// The id is what Abort finds a request by, and stands in the access log.
inline constexpr size_t kMaxVllmRequestIdBytes = 256;
absl::Status CheckVllmRequestId(const std::string& id);

}  // namespace kvasir::router
