#include "summary/plan_summary.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace kvasir::cli {
namespace {

using plan::ResolvedPart;

std::string SpaceName(plan::Space space) {
  switch (space) {
    case plan::Space::kFull:
      return "full";
    case plan::Space::kLowRank:
      return "low_rank";
    case plan::Space::kRopePairs:
      return "rope_pairs";
    case plan::Space::kRopeLowRank:
      return "rope_low_rank";
  }
  return "none";
}

std::string LiftName(const ResolvedPart& part) {
  std::vector<std::string> names;
  for (const plan::ResolvedUse& use : part.uses) {
    switch (use.lift) {
      case plan::Lift::kFold:
        names.push_back("fold");
        break;
      case plan::Lift::kAtRuntime:
        names.push_back("at_runtime");
        break;
      case plan::Lift::kReconstruct:
        names.push_back("reconstruct");
        break;
      case plan::Lift::kAnchored:
        names.push_back("anchored");
        break;
    }
  }
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names.empty() ? "-" : absl::StrJoin(names, ",");
}

std::string StoredName(plan::RopeSide stored) {
  switch (stored) {
    case plan::RopeSide::kBefore:
      return "pre_rope";
    case plan::RopeSide::kAfter:
      return "post_rope";
    case plan::RopeSide::kNone:
      break;
  }
  return "no_rope";
}

std::string RangeName(const ResolvedPart& part) {
  switch (part.range) {
    case plan::RangeKind::kToken:
      return part.range_channels == 0
                 ? "token"
                 : absl::StrCat("token/", part.range_channels);
    case plan::RangeKind::kTokenNorm:
      return "norm";
    case plan::RangeKind::kChannel:
      return "static";
    case plan::RangeKind::kSequence:
      return "sequence";
    case plan::RangeKind::kNone:
      break;
  }
  return "-";
}

std::string TransformName(plan::Transform transform) {
  switch (transform) {
    case plan::Transform::kHadamardFused:
      return "hadamard_fused";
    case plan::Transform::kHadamardOnline:
      return "hadamard_online";
    case plan::Transform::kBasisStatic:
      return "basis_static";
    case plan::Transform::kBasisSequence:
      return "basis_sequence";
    case plan::Transform::kNone:
      break;
  }
  return "-";
}

// Returns "8x32" for 8 groups of rank 32, and "2x48,40" for two groups of rank
// 48 and a group of rank 40.
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

LayerSideSummary SummarizeSide(const plan::ResolvedSide& side,
                               const cache::SideLayout& layout) {
  std::vector<std::string> methods, groups, bits, lifts, stored, ranges,
      transforms;
  LayerSideSummary summary;
  for (const cache::PartLayout& part : layout.parts) {
    const ResolvedPart& resolved =
        side.parts[static_cast<size_t>(part.part_index)];
    methods.push_back(absl::StrCat(resolved.joint ? "joint " : "",
                                   SpaceName(resolved.space)));
    groups.push_back(GroupsText(part.groups));
    bits.push_back(resolved.bits.empty()
                       ? std::string(plan::DataTypeName(resolved.dtype))
                       : absl::StrJoin(resolved.bits, ","));
    lifts.push_back(LiftName(resolved));
    stored.push_back(StoredName(resolved.stored));
    ranges.push_back(RangeName(resolved));
    transforms.push_back(TransformName(resolved.transform));
    for (const cache::GroupLayout& group : part.groups) {
      summary.rank += group.width;
      summary.group_list.push_back(
          {part.part_index, group.heads, group.width,
           part.of_keys ? 0
                        : resolved.latents[static_cast<size_t>(group.latent)]
                              .stored_channels()});
      if (group.params.num_slots > 0 && !part.of_keys) {
        summary.param_bytes_per_token +=
            static_cast<double>(group.params.slot_bytes);
      }
    }
  }
  summary.exact_sinks = side.exact_sinks;
  summary.exact_window = side.exact_window;
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
  return absl::StrCat("dense ", plan::DataTypeName(type));
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
          bf16 / plan::DataTypeBytes(kvasir::v1::BF16) *
              plan::DataTypeBytes(own_type),
          bf16};
}

std::vector<LayerSideSummary> SummarizePlan(const plan::ResolvedPlan& plan,
                                            const cache::PageLayout& layout) {
  std::vector<LayerSideSummary> rows;
  for (int64_t l = 0; l < plan.num_layers(); ++l) {
    const cache::LayerLayout& layer = layout.layer(l);
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      LayerSideSummary row =
          SummarizeSide(plan.attention_of(l).side(side), layer.side(side));
      row.layer = l;
      row.side = std::string(plan::SideName(side));
      row.bytes_per_token = layout.PayloadBytesPerToken(l, side);
      row.sliding_window = layout.page_group(layer.page_group).sliding_window;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace kvasir::cli
