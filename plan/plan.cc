#include "plan/plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::plan {

using kvasir::v1::DataType;
using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::SidePlan;
using kvasir::v1::Stored;

absl::string_view SideName(Side side) {
  return side == Side::kKey ? "key" : "value";
}

int64_t DataTypeBytes(DataType dtype) {
  switch (dtype) {
    case kvasir::v1::F32:
      return 4;
    case kvasir::v1::F16:
    case kvasir::v1::BF16:
      return 2;
    default:  // Protobuf enums are open: a file may have any number.
      return 0;
  }
}

absl::string_view DataTypeName(DataType dtype) {
  switch (dtype) {
    case kvasir::v1::F32:
      return "f32";
    case kvasir::v1::F16:
      return "f16";
    case kvasir::v1::BF16:
      return "bf16";
    default:
      return "unspecified";
  }
}

absl::StatusOr<DataType> ParseDataType(absl::string_view name) {
  for (DataType dtype : {kvasir::v1::F32, kvasir::v1::F16, kvasir::v1::BF16}) {
    if (DataTypeName(dtype) == name) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown data type \"", name, "\": want f32, f16 or bf16"));
}

KvPlan FullRankPlan(const AttentionShape& shape, DataType dtype) {
  KVASIR_CHECK(DataTypeBytes(dtype) > 0);
  KvPlan plan;
  plan.set_schema_version(kPlanSchemaVersion);
  plan.set_method("full");
  for (int64_t l = 0; l < shape.num_layers(); ++l) {
    LayerPlan* out = plan.add_layers();
    const auto add = [dtype](SidePlan* side, Stored stored) {
      Part* part = side->add_parts();
      part->mutable_full();
      part->set_stored(stored);
      part->mutable_codec()->set_dtype(dtype);
    };
    add(out->mutable_key(),
        shape.num_pairs(l) > 0 ? kvasir::v1::POST_ROPE : kvasir::v1::NO_ROPE);
    add(out->mutable_value(), kvasir::v1::NO_ROPE);
  }
  return plan;
}

absl::StatusOr<KvPlan> ParsePlanJson(absl::string_view text,
                                     absl::string_view name) {
  if (text.size() > static_cast<size_t>(kMaxPlanJsonBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": the plan has ", text.size(),
                     " bytes, but the limit is ", kMaxPlanJsonBytes));
  }
  KvPlan plan;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto parsed = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(text.data(), text.size()), &plan, options);
  if (!parsed.ok()) {
    // The parser's message repeats keys and values, which may be megabytes.
    constexpr size_t kMostBytes = 300;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": this is not a KvPlan message in JSON: ",
                     parsed.ToString().substr(0, kMostBytes)));
  }
  if (plan.schema_version() != kPlanSchemaVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": the plan's schema_version must be ",
                     kPlanSchemaVersion, ", but is ", plan.schema_version()));
  }
  return plan;
}

std::string PlanToJson(const KvPlan& plan) {
  std::string text;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  const auto printed =
      google::protobuf::util::MessageToJsonString(plan, &text, options);
  KVASIR_CHECK(printed.ok());
  if (text.empty() || text.back() != '\n') text.push_back('\n');
  return text;
}

bool SetExactTokens(const ExactTokens& exact, KvPlan* plan) {
  const auto has_codes = [](const auto& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const auto& part) {
      return part.codec().has_bits();
    });
  };
  bool any = false;
  for (kvasir::v1::LayerPlan& layer : *plan->mutable_layers()) {
    const bool joint = has_codes(layer.joint());
    bool any_side = false;
    for (kvasir::v1::SidePlan* side :
         {layer.mutable_key(), layer.mutable_value()}) {
      if (!joint && !has_codes(side->parts())) continue;
      if (exact.window.has_value()) side->set_exact_window(*exact.window);
      any_side = true;
    }
    if (any_side && exact.sinks.has_value()) {
      layer.set_exact_sinks(*exact.sinks);
    }
    any = any || any_side;
  }
  return any;
}

void ClampExactRows(int64_t tokens, KvPlan* plan) {
  for (kvasir::v1::LayerPlan& layer : *plan->mutable_layers()) {
    const int64_t sinks = std::min<int64_t>(layer.exact_sinks(), tokens);
    layer.set_exact_sinks(static_cast<uint32_t>(sinks));
    for (kvasir::v1::SidePlan* side :
         {layer.mutable_key(), layer.mutable_value()}) {
      // The window need not cover tokens that are already sinks.
      const int64_t window =
          std::min<int64_t>(side->exact_window(), tokens - sinks);
      side->set_exact_window(static_cast<uint32_t>(window));
    }
  }
}

}  // namespace kvasir::plan
