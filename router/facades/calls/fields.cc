#include "router/facades/calls/fields.h"

#include <cmath>
#include <utility>
#include <vector>

namespace kvasir::router {

absl::Status FieldNotBuilt(const std::string& what) {
  return absl::UnimplementedError(absl::StrCat(what, " is not implemented"));
}

absl::Status RefuseUnknownFields(const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return FieldNotBuilt(absl::StrCat("field ", unknown.field(0).number(), " of ",
                                    message.GetDescriptor()->name()));
}

absl::Status CheckFiniteField(const std::string& field, float value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return WrongField(field, "a finite number", value);
}

absl::StatusOr<proto::TokenBytes> PromptIdsOf(
    const std::string& field,
    const google::protobuf::RepeatedField<uint32_t>& wire) {
  if (wire.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": want at least one token, have none"));
  }
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(wire.size()));
  for (const uint32_t id : wire) {
    if (id > kMaxTokenId) return WrongField(field, "token ids below 2^31", id);
    ids.push_back(static_cast<int32_t>(id));
  }
  return proto::TokenBytes::Adopt(std::move(ids));
}

absl::Status AddStopIds(const std::string& field,
                        const google::protobuf::RepeatedField<uint32_t>& wire,
                        kvasir::v1::SamplingParams* sampling) {
  for (const uint32_t id : wire) {
    if (id > kMaxTokenId) return WrongField(field, "token ids below 2^31", id);
    sampling->add_stop_token_ids(static_cast<int32_t>(id));
  }
  return absl::OkStatus();
}

absl::Status CheckVllmRequestId(const std::string& id) {
  if (id.size() <= kMaxVllmRequestIdBytes) return absl::OkStatus();
  return WrongField("request_id",
                    absl::StrCat("at most ", kMaxVllmRequestIdBytes, " bytes"),
                    id.size());
}

}  // namespace kvasir::router
