#include "server/inspect/evaluation.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/files/json.h"

namespace kvasir::cli {
namespace {

using model::JsonFields;

constexpr double kNoLimit = std::numeric_limits<double>::max();
constexpr size_t kMaxRows = 10'000;
constexpr size_t kMaxNameBytes = 4096;

absl::StatusOr<std::string> Text(const JsonFields& fields,
                                 std::string_view name) {
  KVASIR_ASSIGN_OR_RETURN(std::optional<std::string> text, fields.String(name));
  if (!text.has_value()) return fields.Error(name, "is missing; want a text");
  if (text->size() > kMaxNameBytes) {
    return fields.Error(name, absl::StrCat("want at most ", kMaxNameBytes,
                                           " bytes, have ", text->size()));
  }
  return *std::move(text);
}

absl::StatusOr<const nlohmann::json*> Child(const JsonFields& fields,
                                            std::string_view name, bool array) {
  const nlohmann::json* child = fields.Find(name);
  if (child == nullptr || (array ? !child->is_array() : !child->is_object())) {
    return fields.Error(
        name, absl::StrCat(
                  "want ", array ? "a list" : "an object", ", have ",
                  child == nullptr ? "nothing" : model::JsonExcerpt(*child)));
  }
  return child;
}

// Reads a number of at least `least`.
absl::Status Read(const JsonFields& fields, std::string_view name, double least,
                  double* out) {
  KVASIR_ASSIGN_OR_RETURN(*out, fields.NumberIn(name, least, kNoLimit));
  return absl::OkStatus();
}

// Reads a number; null means infinity.
absl::Status ReadOrInfinite(const JsonFields& fields, std::string_view name,
                            double least, double* out) {
  if (!fields.IsNull(name)) return Read(fields, name, least, out);
  *out = std::numeric_limits<double>::infinity();
  return absl::OkStatus();
}

absl::Status ReadInterval(const JsonFields& fields, EvaluationRow* row) {
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json* const interval,
                          Child(fields, "added_ci95", /*array=*/true));
  if (interval->size() != 2 || !(*interval)[0].is_number() ||
      !(*interval)[1].is_number()) {
    return fields.Error("added_ci95",
                        absl::StrCat("want two numbers [low, high], have ",
                                     model::JsonExcerpt(*interval)));
  }
  row->added_low = (*interval)[0].get<double>();
  row->added_high = (*interval)[1].get<double>();
  if (!(row->added_low <= row->added_high)) {
    return fields.Error(
        "added_ci95",
        absl::StrCat("the lower bound ", row->added_low,
                     " must not be above the upper bound ", row->added_high));
  }
  return absl::OkStatus();
}

// Reads the cache's size at the end of a window, and the eviction method. Files
// without these fields are older and about plans without eviction.
absl::Status ReadHeld(const JsonFields& fields, int64_t window_tokens,
                      EvaluationRow* row) {
  const auto tokens = static_cast<double>(window_tokens);
  KVASIR_ASSIGN_OR_RETURN(const double held,
                          fields.NumberIn("kv_bytes_per_sequence", 0, kNoLimit,
                                          row->kv_bytes_per_token * tokens));
  row->kv_bytes_per_seen_token = held / tokens;
  if (fields.Find("eviction") == nullptr) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json* const eviction,
                          Child(fields, "eviction", /*array=*/false));
  KVASIR_ASSIGN_OR_RETURN(
      row->eviction,
      Text(JsonFields(*eviction, fields.where() + ": eviction"), "method"));
  return absl::OkStatus();
}

absl::StatusOr<EvaluationRow> ReadRow(const JsonFields& fields,
                                      int64_t window_tokens) {
  EvaluationRow row;
  KVASIR_ASSIGN_OR_RETURN(row.model, Text(fields, "model"));
  KVASIR_ASSIGN_OR_RETURN(row.method, Text(fields, "method"));
  KVASIR_ASSIGN_OR_RETURN(row.keep, fields.NumberIn("keep", 0, 1));
  const struct {
    std::string_view name;
    double least;
    double* out;
  } numbers[] = {
      {"kv_bytes_per_token", 0, &row.kv_bytes_per_token},
      {"kv_payload_bytes_per_token", 0, &row.kv_payload_bytes_per_token},
      {"fixed_bytes_per_sequence", 0, &row.fixed_bytes_per_sequence},
      {"nats_per_token", 0, &row.nats_per_token},
      {"nats_per_byte", 0, &row.nats_per_byte},
      {"added_nats_per_token", -kNoLimit, &row.added_nats_per_token},
      {"top1_agreement", 0, &row.top1_agreement},
  };
  for (const auto& number : numbers) {
    KVASIR_RETURN_IF_ERROR(Read(fields, number.name, number.least, number.out));
  }
  KVASIR_RETURN_IF_ERROR(
      ReadOrInfinite(fields, "perplexity", 0, &row.perplexity));
  KVASIR_RETURN_IF_ERROR(
      ReadOrInfinite(fields, "kl_nats", -kNoLimit, &row.kl_nats));
  // This field is null if the evaluation had no repeat test. Then
  // use nats_per_token.
  KVASIR_ASSIGN_OR_RETURN(row.repeat_nats_per_token,
                          fields.NumberIn("repeat_nats_per_token", 0, kNoLimit,
                                          row.nats_per_token));
  KVASIR_RETURN_IF_ERROR(ReadInterval(fields, &row));
  KVASIR_RETURN_IF_ERROR(ReadHeld(fields, window_tokens, &row));
  return row;
}

}  // namespace

absl::StatusOr<Evaluation> ParseEvaluation(std::string_view json,
                                           const std::string& where) {
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json root,
                          model::ParseJson(json, where));
  const JsonFields fields(root, where);
  Evaluation evaluation;
  KVASIR_ASSIGN_OR_RETURN(evaluation.text, Text(fields, "text"));
  KVASIR_ASSIGN_OR_RETURN(
      evaluation.window_tokens,
      fields.IntIn("window_tokens", 1, std::numeric_limits<int32_t>::max()));
  KVASIR_ASSIGN_OR_RETURN(
      evaluation.windows,
      fields.IntIn("windows", 1, std::numeric_limits<int32_t>::max()));

  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json* const teacher,
                          Child(fields, "teacher", /*array=*/false));
  const JsonFields teacher_fields(*teacher, absl::StrCat(where, ": teacher"));
  EvaluationTeacher& out = evaluation.teacher;
  KVASIR_ASSIGN_OR_RETURN(out.model, Text(teacher_fields, "model"));
  KVASIR_RETURN_IF_ERROR(
      Read(teacher_fields, "nats_per_token", 0, &out.nats_per_token));
  KVASIR_RETURN_IF_ERROR(
      Read(teacher_fields, "nats_per_byte", 0, &out.nats_per_byte));
  KVASIR_RETURN_IF_ERROR(
      Read(teacher_fields, "kv_bytes_per_token", 0, &out.kv_bytes_per_token));

  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json* const rows,
                          Child(fields, "rows", /*array=*/true));
  if (rows->size() > kMaxRows) {
    return fields.Error("rows", absl::StrCat("want at most ", kMaxRows,
                                             ", have ", rows->size()));
  }
  for (size_t i = 0; i < rows->size(); ++i) {
    const JsonFields row((*rows)[i], absl::StrCat(where, ": rows[", i, "]"));
    KVASIR_ASSIGN_OR_RETURN(EvaluationRow read,
                            ReadRow(row, evaluation.window_tokens));
    evaluation.rows.push_back(std::move(read));
  }
  return evaluation;
}

}  // namespace kvasir::cli
