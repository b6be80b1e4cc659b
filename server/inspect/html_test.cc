#include "server/inspect/html.h"

#include <limits>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/inspect/test_plans.h"

namespace kvasir::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

InspectReport ReportOf(const ModelSource& source) {
  auto report =
      MakeInspectReport(source, {.page_tokens = 16, .lengths = {100, 512}});
  KVASIR_EXPECT_OK(report);
  return report.ok() ? *std::move(report) : InspectReport{};
}

Evaluation SomeEvaluation(const std::string& method) {
  Evaluation evaluation;
  evaluation.teacher = {.model = "the <teacher>", .kv_bytes_per_token = 4096};
  evaluation.text = "evaluation & more";
  evaluation.windows = 100;
  evaluation.window_tokens = 512;
  for (const double keep : {0.75, 0.25}) {
    evaluation.rows.push_back({.model = "m",
                               .method = method,
                               .keep = keep,
                               .kv_bytes_per_token = 4096 * keep,
                               .added_nats_per_token = 0.01 / keep,
                               .added_low = -0.001,
                               .added_high = 0.02 / keep});
  }
  return evaluation;
}

// A page in two parts: the JSON data in its script element, and the rest.
struct Page {
  nlohmann::json data;
  std::string frame;
};

Page PageOf(const InspectReport& report,
            const std::vector<Evaluation>& evaluations) {
  const std::string html = ReportToHtml(report, evaluations);
  const std::string begin = R"(<script type="application/json" id="data">)";
  const size_t from = html.find(begin);
  EXPECT_NE(from, html.npos);
  // A browser ends the script element at the first "</script", even inside
  // a string.
  const size_t to = html.find("</script", from);
  EXPECT_NE(to, html.npos);
  if (from == html.npos || to == html.npos) return {};
  const size_t text = from + begin.size();
  return {nlohmann::json::parse(html.substr(text, to - text)),
          html.substr(0, from) + html.substr(to)};
}

TEST(InspectHtmlTest, TheReportPageNeedsNoOtherFile) {
  const std::string page =
      ReportToHtml(ReportOf(SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                       LowRankPart("fold", "NO_ROPE"))),
                   {SomeEvaluation("palu")});
  for (const char* outside : {"<link", "@import", "url(", "src=", "href=",
                              "fetch(", "XMLHttpRequest", "import("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(page, Not(HasSubstr("{{")));
}

TEST(InspectHtmlTest, TheHtmlPageContainsTheDataOfTheReport) {
  const InspectReport report = ReportOf(SourceWith(
      LowRankPart("reconstruct", "PRE_ROPE"), LowRankPart("fold", "NO_ROPE")));
  const Page page = PageOf(report, {SomeEvaluation("rap")});
  EXPECT_EQ(page.data["report"], nlohmann::json(ReportToJson(report)));
  ASSERT_EQ(page.data["curve"].size(), report.curve.size());
  EXPECT_EQ(page.data["curve"].back()["tokens"], 512);
  EXPECT_EQ(page.data["curve"].back()["kv_bytes"],
            report.curve.back().cache.total());
  const nlohmann::json& evaluation = page.data["evaluations"].at(0);
  EXPECT_EQ(evaluation["teacher"]["model"], "the <teacher>");
  EXPECT_EQ(evaluation["rows"].size(), 2u);
  EXPECT_EQ(evaluation["rows"][1]["added_ci95"][0], -0.001);
}

TEST(InspectHtmlTest, NamesOfModelsAndPlansAreEscapedInTheHtmlPage) {
  ModelSource source = SourceWith(kFullKey, kFullValue);
  const std::string evil = "</script><!--<script>{{data}}</title></pre>\xff";
  source.name = evil;
  source.spec.model_type = evil;
  kvasir::v1::KvPlan plan = source.plan->source;
  plan.set_method(evil);
  plan.set_base_model(evil);
  plan.mutable_provenance()->set_options(evil);
  KVASIR_ASSERT_OK(source.SetPlan(plan));
  Evaluation evaluation = SomeEvaluation(evil);
  evaluation.teacher.model = evil;
  evaluation.text = evil;
  evaluation.rows[0].model = evil;
  const Page page = PageOf(ReportOf(source), {evaluation});
  // The last byte is invalid UTF-8 and becomes U+FFFD.
  const std::string kept = evil.substr(0, evil.size() - 1) + "\xef\xbf\xbd";
  EXPECT_EQ(page.data["report"]["model"], kept);
  EXPECT_EQ(page.data["evaluations"][0]["rows"][0]["method"], kept);
  EXPECT_EQ(page.data["evaluations"][0]["text"], kept);
  EXPECT_THAT(page.frame, Not(HasSubstr("<!--")));
  EXPECT_THAT(page.frame, HasSubstr("<title>&lt;/script&gt;&lt;!--"));
}

TEST(InspectHtmlTest, WithoutScriptsTheHtmlPageShowsTheTextReport) {
  const InspectReport report = ReportOf(SourceWith(kFullKey, kFullValue));
  EXPECT_THAT(PageOf(report, {}).frame, HasSubstr(ReportToText(report)));
}

TEST(InspectHtmlTest, TheHtmlPageContainsTheCurveOfThePredictedDivergence) {
  InspectReport report = ReportOf(SourceWith(kFullKey, kFullValue));
  EXPECT_TRUE(PageOf(report, {}).data["report"]["prediction"].is_null());
  report.prediction = {.plan_sha256 = "</script>",
                       .plan = {.bytes_per_token = 900, .kl = 0.02},
                       .curve = {{500, 0.5}, {1000, 0.01}},
                       .probes = {{600, 0.07}}};
  const nlohmann::json shown = PageOf(report, {}).data["report"]["prediction"];
  EXPECT_EQ(shown["kl"], 0.02);
  EXPECT_EQ(shown["curve"][1]["bytes_per_token"], 1000);
  EXPECT_EQ(shown["probes"][0]["kl"], 0.07);
}

TEST(InspectHtmlTest, InfiniteNumbersAreNullInTheDataOfTheHtmlPage) {
  Evaluation evaluation = SomeEvaluation("rap");
  evaluation.rows[0].perplexity = std::numeric_limits<double>::infinity();
  const Page page =
      PageOf(ReportOf(SourceWith(kFullKey, kFullValue)), {evaluation});
  EXPECT_TRUE(page.data["evaluations"][0]["rows"][0]["perplexity"].is_null());
}

}  // namespace
}  // namespace kvasir::cli
