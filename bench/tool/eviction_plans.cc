#include "bench/tool/eviction_plans.h"

#include <algorithm>

#include "base/status_macros.h"
#include "plan/plan.h"

namespace kvasir::cli {

using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;

absl::StatusOr<KvPlan> EvictingPlan(const plan::EvictionSettings& settings,
                                    EvictionUnit unit,
                                    const plan::AttentionShape& shape,
                                    KvPlan plan) {
  KVASIR_RETURN_IF_ERROR(plan::ApplyEviction(settings, shape, &plan));
  for (LayerPlan& layer : *plan.mutable_layers()) {
    if (!layer.has_eviction()) continue;
    auto* const units = layer.mutable_eviction()->mutable_units();
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      if (head == 0 || unit == EvictionUnit::kKvHead) units->Add();
      units->rbegin()->add_heads(static_cast<uint32_t>(head));
    }
  }
  KVASIR_RETURN_IF_ERROR(plan::ValidatePlan(plan, shape));
  return plan;
}

KvPlan WithoutEviction(KvPlan plan) {
  for (LayerPlan& layer : *plan.mutable_layers()) layer.clear_eviction();
  return plan;
}

int64_t FewestBits(const KvPlan& plan) {
  int64_t fewest = 16;
  const auto see = [&](int64_t bits) {
    if (bits > 0) fewest = std::min(fewest, bits);
  };
  for (const LayerPlan& layer : plan.layers()) {
    for (const auto* parts :
         {&layer.joint(), &layer.key().parts(), &layer.value().parts()}) {
      for (const kvasir::v1::Part& part : *parts) {
        const auto& bits = part.codec().bits();
        for (const uint32_t of_code : bits.schedule()) see(of_code);
        for (const auto& run : bits.runs()) see(run.bits());
      }
    }
  }
  return fewest;
}

}  // namespace kvasir::cli
