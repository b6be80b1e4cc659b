#include "cli/plan_summary.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "model/checkpoint/plan_tensors.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Part;

std::string SpaceName(const Part& part) {
  switch (part.space_case()) {
    case Part::kFull:
      return "full";
    case Part::kLowRank:
      return "low_rank";
    case Part::kRopePairs:
      return "rope_pairs";
    case Part::kRopeLowRank:
      return "rope_low_rank";
    case Part::SPACE_NOT_SET:
      break;
  }
  return "none";
}

std::string LiftName(const Part& part) {
  std::vector<std::string> names;
  for (const Part::Use& use : part.uses()) {
    switch (use.lift_case()) {
      case Part::Use::kFold:
        names.push_back("fold");
        break;
      case Part::Use::kAtRuntime:
        names.push_back("at_runtime");
        break;
      case Part::Use::kReconstruct:
        names.push_back("reconstruct");
        break;
      case Part::Use::kAnchored:
        names.push_back("anchored");
        break;
      case Part::Use::LIFT_NOT_SET:
        break;
    }
  }
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names.empty() ? "-" : absl::StrJoin(names, ",");
}

std::string StoredName(const Part& part) {
  switch (part.stored()) {
    case kvasir::v1::PRE_ROPE:
      return "pre_rope";
    case kvasir::v1::POST_ROPE:
      return "post_rope";
    case kvasir::v1::NO_ROPE:
      return "no_rope";
    default:
      return "-";
  }
}

std::string RangeName(const Codec& codec) {
  switch (codec.range_case()) {
    case Codec::kPerToken:
      return codec.per_token().group() == 0
                 ? "token"
                 : absl::StrCat("token/", codec.per_token().group());
    case Codec::kChannelStatic:
      return "static";
    case Codec::kChannelSequence:
      return "sequence";
    case Codec::RANGE_NOT_SET:
      break;
  }
  return "-";
}

std::string TransformName(const Codec& codec) {
  switch (codec.transform_case()) {
    case Codec::kHadamardFused:
      return "hadamard_fused";
    case Codec::kHadamardOnline:
      return "hadamard_online";
    case Codec::kBasisStatic:
      return "basis_static";
    case Codec::kBasisSequence:
      return "basis_sequence";
    default:
      return "-";
  }
}

// "8x32", "2x48,40": runs of groups of one rank.
std::string GroupsText(const std::vector<cache::GroupLayout>& groups) {
  std::vector<std::string> runs;
  for (size_t begin = 0; begin < groups.size();) {
    size_t end = begin;
    while (end < groups.size() && groups[end].width == groups[begin].width) {
      ++end;
    }
    const std::string rank = absl::StrCat(groups[begin].width);
    runs.push_back(end - begin == 1 ? rank
                                    : absl::StrCat(end - begin, "x", rank));
    begin = end;
  }
  if (groups.size() == 1) return absl::StrCat("1x", runs[0]);
  return absl::StrJoin(runs, ",");
}

LayerSideSummary SummarizeSide(const kvasir::v1::SidePlan& plan,
                               const cache::SideLayout& layout) {
  std::vector<std::string> methods, groups, bits, lifts, stored, ranges,
      transforms;
  LayerSideSummary summary;
  for (const cache::PartLayout& part : layout.parts) {
    const Part& planned = plan.parts(part.part_index);
    methods.push_back(SpaceName(planned));
    groups.push_back(GroupsText(part.groups));
    bits.push_back(part.bits.empty()
                       ? std::string(cache::DataTypeName(part.dtype))
                       : absl::StrJoin(part.bits, ","));
    lifts.push_back(LiftName(planned));
    stored.push_back(StoredName(planned));
    ranges.push_back(RangeName(planned.codec()));
    transforms.push_back(TransformName(planned.codec()));
    for (const cache::GroupLayout& group : part.groups) {
      summary.rank += group.width;
      summary.group_list.push_back(
          {part.part_index, group.heads, group.width,
           model::StoredChannels(planned.codec(), group.width)});
      if (group.params.num_slots > 0) {
        summary.param_bytes_per_token +=
            static_cast<double>(group.params.slot_stride_bytes);
      }
    }
  }
  summary.method = absl::StrJoin(methods, "+");
  summary.groups = absl::StrJoin(groups, "+");
  summary.bits = absl::StrJoin(bits, "+");
  summary.lift = absl::StrJoin(lifts, "+");
  summary.stored = absl::StrJoin(stored, "+");
  summary.range = absl::StrJoin(ranges, "+");
  summary.transform = absl::StrJoin(transforms, "+");
  return summary;
}

}  // namespace

std::string DenseBytes::name() const {
  return absl::StrCat("dense ", cache::DataTypeName(type));
}

std::string DenseBytes::text() const {
  return absl::StrCat(name(), " ", own,
                      is_bf16() ? "" : absl::StrCat(", bf16 ", bf16));
}

std::string DenseBytes::RatioText(double bytes_per_token) const {
  std::string text =
      absl::StrFormat("%.3f", static_cast<double>(own) / bytes_per_token);
  if (!is_bf16()) {
    absl::StrAppendFormat(&text, " (bf16 %.3f)",
                          static_cast<double>(bf16) / bytes_per_token);
  }
  return text;
}

DenseBytes DenseBytesPerToken(const cache::PageLayout& layout,
                              kvasir::v1::DataType own_type) {
  const int64_t bf16 = layout.dense_bf16_bytes_per_token();
  return {own_type,
          bf16 / cache::DataTypeBytes(kvasir::v1::BF16) *
              cache::DataTypeBytes(own_type),
          bf16};
}

std::vector<LayerSideSummary> SummarizePlan(const kvasir::v1::KvPlan& plan,
                                            const cache::PageLayout& layout) {
  std::vector<LayerSideSummary> rows;
  for (int l = 0; l < plan.layers_size(); ++l) {
    const cache::LayerLayout& layer = layout.layer(l);
    for (const cache::Side side : {cache::Side::kKey, cache::Side::kValue}) {
      LayerSideSummary row =
          SummarizeSide(side == cache::Side::kKey ? plan.layers(l).key()
                                                  : plan.layers(l).value(),
                        layer.side(side));
      row.layer = l;
      row.side = std::string(cache::SideName(side));
      row.bytes_per_token = layout.PayloadBytesPerToken(l, side);
      row.sliding_window = layout.page_group(layer.page_group).sliding_window;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace kvasir::cli
