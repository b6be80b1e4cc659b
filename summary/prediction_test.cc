#include "summary/prediction.h"

#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
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
    "kl": 0.02, "kl_low": 0.01, "kl_high": 0.05, "bytes_per_token": 900.5,
    "kappa": {"median": 2, "probes": [
      {"bytes_per_token": 600, "predicted": 0.03, "measured": 0.07}]},
    "curve": [{"bytes_per_token": 500, "kl": 0.5},
              {"bytes_per_token": 1000, "kl": 0.01}]})");
}

TEST(PredictionTest, ReadsTheCurveTheProbesAndThePlansOwnPoint) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Prediction prediction,
                              ParsePrediction(Good().dump(), "p.json"));
  EXPECT_EQ(prediction.plan.kl, 0.02);
  EXPECT_EQ(prediction.plan.bytes_per_token, 900.5);
  EXPECT_EQ(prediction.kl_low, 0.01);
  EXPECT_EQ(prediction.kl_high, 0.05);
  ASSERT_EQ(prediction.curve.size(), 2u);
  EXPECT_EQ(prediction.curve[1].bytes_per_token, 1000);
  EXPECT_EQ(prediction.curve[1].kl, 0.01);
  ASSERT_EQ(prediction.probes.size(), 1u);
  EXPECT_EQ(prediction.probes[0].kl, 0.07);
  const json written = PredictionToJson(prediction);
  EXPECT_EQ(written["curve"], Good()["curve"]);
  EXPECT_EQ(written["probes"][0]["kl"], 0.07);
}

TEST(PredictionTest, OnlyThePlansOwnDivergenceAndBytesAreRequired) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Prediction prediction,
      ParsePrediction(R"({"kl": 0, "bytes_per_token": 1})", "p"));
  EXPECT_EQ(prediction.kl_high, 0);
  EXPECT_TRUE(prediction.curve.empty());
  EXPECT_TRUE(prediction.probes.empty());
  for (const char* field : {"kl", "bytes_per_token"}) {
    json bad = Good();
    bad.erase(field);
    EXPECT_THAT(ParsePrediction(bad.dump(), "p.json"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("p.json"), HasSubstr(field))));
  }
}

TEST(PredictionTest, APredictionBelongsToThePlanWhoseHashItContains) {
  json good = Good();
  KVASIR_ASSERT_OK_AND_ASSIGN(const Prediction unnamed,
                              ParsePrediction(good.dump(), "p"));
  EXPECT_FALSE(unnamed.IsOf(""));
  good["plan_sha256"] = base::Sha256Hex("{}\n");
  KVASIR_ASSERT_OK_AND_ASSIGN(const Prediction prediction,
                              ParsePrediction(good.dump(), "p"));
  EXPECT_TRUE(prediction.IsOf("{}\n"));
  EXPECT_FALSE(prediction.IsOf("{}"));
}

TEST(PredictionTest, TheErrorForAWrongTypeOrValueNamesTheFile) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"/plan_sha256", "7"},
      {"/kl", "\"low\""},
      {"/kl", "-1"},
      {"/kl", "null"},  // the JSON writer writes NaN as null
      {"/kl", "1e300"},
      {"/kl_low", "0.03"},
      {"/kl_high", "0.01"},
      {"/bytes_per_token", "0"},
      {"/bytes_per_token", "[900]"},
      {"/curve", "{}"},
      {"/curve/1", "3"},
      {"/curve/1/kl", "null"},
      {"/curve/0/bytes_per_token", "-5"},
      {"/kappa", "2"},
      {"/kappa/probes", "\"many\""},
      {"/kappa/probes/0/measured", "true"},
  };
  for (const auto& [place, value] : cases) {
    SCOPED_TRACE(std::string(place) + " " + value);
    json bad = Good();
    bad[json::json_pointer(place)] = json::parse(value);
    EXPECT_THAT(
        ParsePrediction(bad.dump(), "p.json"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("p.json: ")));
  }
}

TEST(PredictionTest, AListOfMoreThan4096PointsIsRefused) {
  for (const char* place : {"/curve", "/kappa/probes"}) {
    json bad = Good();
    json& list = bad[json::json_pointer(place)];
    const json point = list[0];
    while (list.size() < 5000) list.push_back(point);
    EXPECT_THAT(ParsePrediction(bad.dump(), "p.json"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("at most 4096 points, found 5000")));
  }
  json bad = Good();
  bad["layers"] = std::vector<int>(200'000);
  EXPECT_THAT(
      ParsePrediction(bad.dump(), "p.json"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("more than")));
}

TEST(PredictionTest, AFileThatIsNotAValidJsonObjectIsRefused) {
  for (const char* text : {"", "{", "[]", "null", "7", "NaN", R"({"kl": NaN})",
                           R"({"kl": 1e999, "bytes_per_token": 1})",
                           R"({"kl": 1, "kl": 1, "bytes_per_token": 1})"}) {
    EXPECT_THAT(
        ParsePrediction(text, "p.json"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("p.json")))
        << text;
  }
}

}  // namespace
}  // namespace kvasir::cli
