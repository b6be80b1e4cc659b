#include "cli/plan_summary.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/plan.h"

namespace kvasir::cli {
namespace {

std::string SpaceName(const kvasir::v1::Part& part) {
  switch (part.space_case()) {
    case kvasir::v1::Part::kFull:
      return "full";
    case kvasir::v1::Part::kLowRank:
      return "low_rank";
    case kvasir::v1::Part::kRopePairs:
      return "rope_pairs";
    case kvasir::v1::Part::kRopeLowRank:
      return "rope_low_rank";
    case kvasir::v1::Part::SPACE_NOT_SET:
      break;
  }
  return "none";
}

LayerSideSummary SummarizeSide(const kvasir::v1::SidePlan& plan,
                               const cache::SideLayout& layout) {
  std::vector<std::string> methods, bits;
  LayerSideSummary summary;
  for (const cache::PartLayout& part : layout.parts) {
    methods.push_back(SpaceName(plan.parts(part.part_index)));
    bits.push_back(part.bits.empty()
                       ? std::string(cache::DataTypeName(part.dtype))
                       : absl::StrJoin(part.bits, ","));
    for (const cache::GroupLayout& group : part.groups) {
      summary.rank += group.width;
    }
  }
  summary.method = absl::StrJoin(methods, "+");
  summary.bits = absl::StrJoin(bits, "+");
  return summary;
}

}  // namespace

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
