#include "plan/plan.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::cache {

using kvasir::v1::Codec;
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
    default:  // an open enum: a file may hold any number
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

KvPlan FullRankPlan(const CacheShape& shape, DataType dtype) {
  KVASIR_CHECK(DataTypeBytes(dtype) > 0);
  KvPlan plan;
  plan.set_schema_version(kPlanSchemaVersion);
  plan.set_method("full");
  for (const CacheLayerShape& layer : shape.layers) {
    LayerPlan* out = plan.add_layers();
    const bool rotates = layer.rope && shape.rotary_dim > 0;
    const auto add = [dtype](SidePlan* side, Stored stored) {
      Part* part = side->add_parts();
      part->mutable_full();
      part->set_stored(stored);
      part->mutable_codec()->set_dtype(dtype);
    };
    add(out->mutable_key(),
        rotates ? kvasir::v1::POST_ROPE : kvasir::v1::NO_ROPE);
    add(out->mutable_value(), kvasir::v1::NO_ROPE);
  }
  return plan;
}

absl::StatusOr<KvPlan> ParsePlanJson(absl::string_view text,
                                     absl::string_view name) {
  if (text.size() > static_cast<size_t>(kMaxPlanJsonBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": a plan has at most ", kMaxPlanJsonBytes,
                     " bytes, have ", text.size()));
  }
  KvPlan plan;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto parsed = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(text.data(), text.size()), &plan, options);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": no KvPlan: ", parsed.ToString()));
  }
  if (plan.schema_version() != kPlanSchemaVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": schema_version: want ", kPlanSchemaVersion,
                     ", have ", plan.schema_version()));
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

namespace {

// Numbers of each group of a rope_low_rank space.
std::vector<int64_t> Widths(const kvasir::v1::RopeLowRankSpace& space) {
  std::vector<int64_t> widths;
  for (const auto& group : space.groups()) {
    int64_t& width = widths.emplace_back(0);
    for (const uint32_t rank : group.rank_per_pair()) {
      width += 2 * int64_t{rank};
    }
  }
  return widths;
}

// What a part asks for that no kernel does; empty: nothing.
std::string BeyondThisBuild(const Part& part) {
  for (const Part::Use& use : part.uses()) {
    if (use.has_anchored()) return "ANCHORED keys";
  }
  const Codec& codec = part.codec();
  if (codec.has_basis_sequence()) return "a basis of the sequence";
  if (codec.has_channel_sequence()) return "ranges of the sequence";
  if (part.has_low_rank() && part.stored() == kvasir::v1::POST_ROPE) {
    return "a low_rank space of keys stored POST_ROPE";
  }
  if (part.has_rope_low_rank() && part.stored() == kvasir::v1::PRE_ROPE) {
    const std::vector<int64_t> widths = Widths(part.rope_low_rank());
    if (std::adjacent_find(widths.begin(), widths.end(),
                           std::not_equal_to<>()) != widths.end()) {
      return absl::StrCat(
          "a rope_low_rank space stored PRE_ROPE with groups of unlike width (",
          absl::StrJoin(widths, ", "), " numbers)");
    }
  }
  return "";
}

// `where`: layer and side.
absl::Status CheckServed(const SidePlan& side, const std::string& where) {
  for (int p = 0; p < side.parts_size(); ++p) {
    const std::string what = BeyondThisBuild(side.parts(p));
    if (what.empty()) continue;
    return absl::UnimplementedError(
        absl::StrCat(where, ": the plan asks for ", what, " in part ", p,
                     ", which this build does not serve"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ServedByThisBuild(const KvPlan& plan) {
  for (int l = 0; l < plan.layers_size(); ++l) {
    const LayerPlan& layer = plan.layers(l);
    for (Side side : {Side::kKey, Side::kValue}) {
      KVASIR_RETURN_IF_ERROR(
          CheckServed(side == Side::kKey ? layer.key() : layer.value(),
                      absl::StrCat("layer ", l, " ", SideName(side))));
    }
    if (layer.has_eviction() || layer.has_selection()) {
      return absl::UnimplementedError(
          absl::StrCat("layer ", l, ": the plan asks for ",
                       layer.has_eviction() ? "eviction" : "selection",
                       "; this build keeps and reads every token"));
    }
  }
  return absl::OkStatus();
}

void ClampExactWindows(int64_t tokens, KvPlan* plan) {
  for (kvasir::v1::LayerPlan& layer : *plan->mutable_layers()) {
    for (kvasir::v1::SidePlan* side :
         {layer.mutable_key(), layer.mutable_value()}) {
      if (int64_t{side->exact_window()} > tokens) {
        side->set_exact_window(static_cast<uint32_t>(tokens));
      }
    }
  }
}

}  // namespace kvasir::cache
