#include "compress/train/recover_ranges.h"

#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "base/status_macros.h"
#include "compress/apply/range_collector.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

bool IsRange(std::string_view name) {
  return name.find(".range.") != std::string_view::npos;
}

}  // namespace

absl::Status RenewRanges(const model::Checkpoint& source,
                         const kvasir::v1::KvPlan& plan,
                         const CalibrationSample& sample, int threads,
                         std::vector<TensorMap>& layers) {
  if (!RangeCollector::IsNeeded(plan)) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(
      RangeCollector collector,
      RangeCollector::Create(source, plan, sample, {.threads = threads}));
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto layer = static_cast<int64_t>(l);
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, LoadLayer(source, layer));
    for (const auto& [name, tensor] : layers[l]) tensors[name] = tensor;
    TensorMap attention;
    for (auto& [name, tensor] : tensors) {
      if (absl::StartsWith(name, "self_attn.") && !IsRange(name)) {
        attention.emplace(name, std::move(tensor));
      }
    }
    KVASIR_RETURN_IF_ERROR(collector.Collect(layer, attention));
    for (const auto& [name, tensor] : attention) {
      if (IsRange(name)) layers[l][name] = tensor;
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::compress
