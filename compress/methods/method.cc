#include "compress/methods/method.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace kvasir::compress {

absl::StatusOr<Decomposition> ParseDecomposition(const std::string& name) {
  for (Decomposition decomposition :
       {Decomposition::kSvd, Decomposition::kWhitened, Decomposition::kEspace,
        Decomposition::kFisher}) {
    if (DecompositionName(decomposition) == name) return decomposition;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown decomposition \"", name,
                   "\": want svd, whitened, espace or fisher"));
}

std::string DecompositionName(Decomposition decomposition) {
  switch (decomposition) {
    case Decomposition::kSvd:
      return "svd";
    case Decomposition::kWhitened:
      return "whitened";
    case Decomposition::kEspace:
      return "espace";
    case Decomposition::kFisher:
      return "fisher";
  }
  KVASIR_CHECK(false);
  return "";
}

CommutingWeights CommutingWeightsOf(const kvasir::v1::KvPlan& plan) {
  if (!plan.provenance().has_commuting()) return {};
  const auto& commuting = plan.provenance().commuting();
  return {.query_weights = commuting.query_energy(),
          .query_floor = commuting.query_floor()};
}

}  // namespace kvasir::compress
