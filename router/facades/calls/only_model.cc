#include "router/facades/calls/only_model.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvasir::router {

int32_t ToInt32(uint64_t count) {
  return static_cast<int32_t>(
      std::min<uint64_t>(count, std::numeric_limits<int32_t>::max()));
}

absl::StatusOr<ModelStatus> OnlyModel(const RequestRouter& router) {
  const std::vector<ModelStatus> models = router.Models();
  if (models.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no model is served yet: ", router.Health().detail));
  }
  for (const ModelStatus& model : models) {
    if (!model.info || !models.front().info ||
        model.info->weights_id() == models.front().info->weights_id()) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "requests of this protocol do not name a model, but this router "
        "serves several: '",
        models.front().name, "' and '", model.name,
        "' are different models: run a router for each"));
  }
  return models.front();
}

}  // namespace kvasir::router
