#include "server/inspect/evaluation.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

json Good() {
  return json::parse(R"({
    "teacher": {"model": "tiny", "nats_per_token": 3.2, "nats_per_byte": 1.1,
                "kv_bytes_per_token": 6144},
    "text": "evaluation.txt", "window_tokens": 512, "windows": 100,
    "rows": [{"model": "tiny-palu", "method": "palu", "keep": 0.5,
      "kv_bytes_per_token": 3072, "kv_payload_bytes_per_token": 3000.5,
      "fixed_bytes_per_sequence": 128, "nats_per_token": 3.3,
      "nats_per_byte": 1.2, "perplexity": 27.1, "added_nats_per_token": 0.1,
      "added_ci95": [0.05, 0.15], "top1_agreement": 0.9, "kl_nats": 0.08,
      "repeat_nats_per_token": 3.31}]})");
}

TEST(EvaluationTest, ReadsTheResultsFileOfTheEvaluateCommand) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Evaluation evaluation,
                              ParseEvaluation(Good().dump(), "results.json"));
  EXPECT_EQ(evaluation.teacher.model, "tiny");
  EXPECT_EQ(evaluation.teacher.kv_bytes_per_token, 6144);
  EXPECT_EQ(evaluation.text, "evaluation.txt");
  EXPECT_EQ(evaluation.windows, 100);
  ASSERT_EQ(evaluation.rows.size(), 1u);
  const EvaluationRow& row = evaluation.rows[0];
  EXPECT_EQ(row.method, "palu");
  EXPECT_EQ(row.keep, 0.5);
  EXPECT_EQ(row.kv_payload_bytes_per_token, 3000.5);
  EXPECT_EQ(row.added_low, 0.05);
  EXPECT_EQ(row.added_high, 0.15);
  EXPECT_EQ(row.repeat_nats_per_token, 3.31);
}

TEST(EvaluationTest, OnlyTheResultOfTheRepeatTestMayBeMissing) {
  json without = Good();
  without["rows"][0]["repeat_nats_per_token"] = nullptr;
  without["rows"][0]["window_nats"] = {1, 2, 3};  // unknown fields are ignored
  KVASIR_ASSERT_OK_AND_ASSIGN(const Evaluation evaluation,
                              ParseEvaluation(without.dump(), "r"));
  EXPECT_EQ(evaluation.rows[0].repeat_nats_per_token, 3.3);
  const json good = Good();
  for (const auto& [field, value] : good["rows"][0].items()) {
    if (field == "repeat_nats_per_token") continue;
    json bad = good;
    bad["rows"][0].erase(field);
    EXPECT_THAT(
        ParseEvaluation(bad.dump(), "r.json"),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("r.json: rows[0]"), HasSubstr(field))));
  }
  for (const auto& [field, value] : good.items()) {
    json bad = good;
    bad.erase(field);
    EXPECT_THAT(ParseEvaluation(bad.dump(), "r.json"),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(field)));
  }
}

TEST(EvaluationTest, BytesPerTokenOfARowWithEvictionCountOnlyTheKeptSlots) {
  json evicts = Good();
  json& row = evicts["rows"][0];
  KVASIR_ASSERT_OK_AND_ASSIGN(const Evaluation before,
                              ParseEvaluation(evicts.dump(), "r"));
  EXPECT_EQ(before.rows[0].kv_bytes_per_seen_token, 3072);
  EXPECT_EQ(before.rows[0].eviction, "");
  row["kv_bytes_per_sequence"] = 128 * 3072;
  row["eviction"] = {{"method", "h2o"}, {"kept_slots", 128}};
  KVASIR_ASSERT_OK_AND_ASSIGN(const Evaluation evaluation,
                              ParseEvaluation(evicts.dump(), "r"));
  EXPECT_EQ(evaluation.rows[0].kv_bytes_per_seen_token, 768);
  EXPECT_EQ(evaluation.rows[0].eviction, "h2o");
  for (const json& bad : {json(7), json::object()}) {
    row["eviction"] = bad;
    EXPECT_THAT(ParseEvaluation(evicts.dump(), "r.json"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("rows[0]"), HasSubstr("eviction"))));
  }
}

TEST(EvaluationTest, NullPerplexityOrDivergenceIsReadAsInfinity) {
  json infinite = Good();
  infinite["rows"][0]["perplexity"] = nullptr;
  infinite["rows"][0]["kl_nats"] = nullptr;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Evaluation evaluation,
                              ParseEvaluation(infinite.dump(), "r"));
  EXPECT_TRUE(std::isinf(evaluation.rows[0].perplexity));
  EXPECT_TRUE(std::isinf(evaluation.rows[0].kl_nats));
  infinite["rows"][0]["nats_per_token"] = nullptr;
  EXPECT_THAT(ParseEvaluation(infinite.dump(), "r"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("nats_per_token")));
}

TEST(EvaluationTest, TheErrorForAWrongTypeOrValueNamesTheFile) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"/teacher", "[]"},
      {"/teacher/nats_per_token", "\"low\""},
      {"/teacher/kv_bytes_per_token", "-1"},
      {"/text", "7"},
      {"/windows", "0"},
      {"/window_tokens", "1.5"},
      {"/rows", "{}"},
      {"/rows/0", "3"},
      {"/rows/0/method", "null"},
      {"/rows/0/keep", "1.5"},
      {"/rows/0/added_ci95", "[1]"},
      {"/rows/0/added_ci95", "[2, 1]"},
      {"/rows/0/added_ci95", "[\"a\", \"b\"]"},
      {"/rows/0/kl_nats", "[]"},
  };
  for (const auto& [place, value] : cases) {
    SCOPED_TRACE(std::string(place) + " " + value);
    json bad = Good();
    bad[json::json_pointer(place)] = json::parse(value);
    EXPECT_THAT(
        ParseEvaluation(bad.dump(), "r.json"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("r.json")));
  }
}

TEST(EvaluationTest, InvalidJsonIsRefusedWithTheNameOfTheFile) {
  for (const char* text : {"", "{", "[]", "null", "7", "{\"rows\":[1e999]}"}) {
    EXPECT_THAT(
        ParseEvaluation(text, "r.json"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("r.json")))
        << text;
  }
}

}  // namespace
}  // namespace kvasir::cli
