#include "summary/prediction.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/files/json.h"

namespace kvasir::cli {
namespace {

using model::JsonFields;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr model::JsonLimits kLimits = {.max_depth = 8, .max_values = 100'000};
constexpr size_t kMaxPoints = 4096;
// A file with numbers outside these limits is refused. Every real plan is far
// within the limits, and a chart can show all numbers within them.
constexpr double kLeastBytes = 1e-6;
constexpr double kMostBytes = 1e15;
constexpr double kMostNats = 1e9;

absl::StatusOr<PlanPoint> ReadPoint(const JsonFields& fields,
                                    std::string_view kl) {
  PlanPoint point;
  KVASIR_ASSIGN_OR_RETURN(
      point.bytes_per_token,
      fields.NumberIn("bytes_per_token", kLeastBytes, kMostBytes));
  KVASIR_ASSIGN_OR_RETURN(point.kl, fields.NumberIn(kl, 0, kMostNats));
  return point;
}

// Reads the list `name` of points. If there is no such list, returns an
// empty one.
absl::StatusOr<std::vector<PlanPoint>> ReadPoints(const JsonFields& fields,
                                                  std::string_view name,
                                                  std::string_view kl) {
  const json* const list = fields.Find(name);
  std::vector<PlanPoint> points;
  if (list == nullptr) return points;
  if (!list->is_array() || list->size() > kMaxPoints) {
    return fields.Error(
        name, absl::StrCat("must be a list of at most ", kMaxPoints,
                           " points, found ",
                           list->is_array() ? absl::StrCat(list->size())
                                            : model::JsonExcerpt(*list)));
  }
  for (size_t i = 0; i < list->size(); ++i) {
    const JsonFields point(
        (*list)[i],
        absl::StrCat(fields.where(), ": ", base::AbslView(name), "[", i, "]"));
    KVASIR_ASSIGN_OR_RETURN(PlanPoint read, ReadPoint(point, kl));
    points.push_back(read);
  }
  return points;
}

ordered_json PointsToJson(const std::vector<PlanPoint>& points) {
  ordered_json list = ordered_json::array();
  for (const PlanPoint& point : points) {
    list.push_back(
        {{"bytes_per_token", point.bytes_per_token}, {"kl", point.kl}});
  }
  return list;
}

}  // namespace

std::string PredictionPathOfPlan(const std::string& plan) {
  return absl::StrCat(plan, ".prediction.json");
}

bool Prediction::IsOf(std::string_view plan_text) const {
  return plan_sha256 == base::Sha256Hex(plan_text);
}

absl::StatusOr<Prediction> ParsePrediction(std::string_view json_text,
                                           const std::string& where) {
  KVASIR_ASSIGN_OR_RETURN(const json root,
                          model::ParseJson(json_text, where, kLimits));
  if (!root.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": must be a JSON object, found ", model::JsonExcerpt(root)));
  }
  const JsonFields fields(root, where);
  Prediction prediction;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> plan,
                          fields.String("plan_sha256"));
  prediction.plan_sha256 = plan.value_or("");
  KVASIR_ASSIGN_OR_RETURN(prediction.plan, ReadPoint(fields, "kl"));
  const double kl = prediction.plan.kl;
  KVASIR_ASSIGN_OR_RETURN(prediction.kl_low,
                          fields.NumberIn("kl_low", 0, kl, kl));
  KVASIR_ASSIGN_OR_RETURN(prediction.kl_high,
                          fields.NumberIn("kl_high", kl, kMostNats, kl));
  KVASIR_ASSIGN_OR_RETURN(prediction.curve, ReadPoints(fields, "curve", "kl"));
  const json* const kappa = fields.Find("kappa");
  if (kappa == nullptr) return prediction;
  if (!kappa->is_object()) {
    return fields.Error("kappa", absl::StrCat("must be a JSON object, found ",
                                              model::JsonExcerpt(*kappa)));
  }
  KVASIR_ASSIGN_OR_RETURN(
      prediction.probes,
      ReadPoints(JsonFields(*kappa, absl::StrCat(where, ": kappa")), "probes",
                 "measured"));
  return prediction;
}

ordered_json PredictionToJson(const Prediction& prediction) {
  return {{"kl", prediction.plan.kl},
          {"kl_low", prediction.kl_low},
          {"kl_high", prediction.kl_high},
          {"bytes_per_token", prediction.plan.bytes_per_token},
          {"curve", PointsToJson(prediction.curve)},
          {"probes", PointsToJson(prediction.probes)}};
}

}  // namespace kvasir::cli
