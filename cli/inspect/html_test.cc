#include "cli/inspect/html.h"

#include <string>

#include "cli/inspect/test_plans.h"
#include "cli/inspect/xml_check.h"

namespace kvasir::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

InspectReport ReportOf(const ModelSource& source) {
  auto report =
      MakeInspectReport(source, {.page_tokens = 16, .lengths = {100, 512}});
  EXPECT_THAT(report, base::IsOk());
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

TEST(InspectHtmlTest, ThePageIsWellFormedAndNeedsNothingElse) {
  const std::string page =
      ReportToHtml(ReportOf(SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                       LowRankPart("fold", "NO_ROPE"))),
                   {SomeEvaluation("palu")});
  // Style rules hold '>' nowhere, so the check covers the whole page.
  EXPECT_EQ(XmlError(page), "");
  EXPECT_THAT(page, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("<link")),
                          Not(HasSubstr("@import")), Not(HasSubstr("url(")),
                          Not(HasSubstr("src=")), Not(HasSubstr("href="))));
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme:dark"));
}

TEST(InspectHtmlTest, EveryLayersRanksAreThere) {
  ModelSource source = SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                  LowRankPart("fold", "NO_ROPE"));
  source.plan.mutable_layers(1)
      ->mutable_key()
      ->mutable_parts(0)
      ->mutable_low_rank()
      ->mutable_groups(1)
      ->set_rank(9);
  const std::string page = ReportToHtml(ReportOf(source), {});
  for (const char* text :
       {"layer 0 key: low_rank, 11 numbers (6,5) as 4, lift reconstruct",
        "layer 1 key: low_rank, 15 numbers (6,9) as 4, lift reconstruct",
        "layer 1 value: low_rank, 11 numbers (6,5) as 4, lift fold",
        "heads 2-3: 9 of rank 9 stored"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
}

TEST(InspectHtmlTest, NamesAreEscapedWhereverTheyStand) {
  ModelSource source = SourceWith(kFullKey, kFullValue);
  const std::string evil = "<b onload=\"x\">&'";
  source.name = evil;
  source.spec.model_type = evil;
  source.plan.set_method(evil);
  source.plan.set_base_model(evil);
  source.plan.mutable_provenance()->set_options(evil);
  source.plan.mutable_provenance()->set_tool_version(evil);
  source.plan.mutable_provenance()->set_calibration_id(evil);
  Evaluation evaluation = SomeEvaluation(evil);
  evaluation.teacher.model = evil;
  evaluation.text = evil;
  evaluation.rows[0].model = evil;
  const std::string page = ReportToHtml(ReportOf(source), {evaluation});
  EXPECT_EQ(XmlError(page), "");
  EXPECT_THAT(page, Not(HasSubstr("<b onload")));
  EXPECT_THAT(page, HasSubstr("&lt;b onload=&quot;x&quot;&gt;&amp;&#39;"));
}

TEST(InspectHtmlTest, EvaluationsOfOneTeacherShareAChart) {
  const InspectReport report = ReportOf(SourceWith(kFullKey, kFullValue));
  const auto count = [&](const std::vector<Evaluation>& evaluations) {
    const std::string page = ReportToHtml(report, evaluations);
    int charts = 0;
    for (size_t at = page.find("<h2>Quality"); at != page.npos;
         at = page.find("<h2>Quality", at + 1)) {
      ++charts;
    }
    return charts;
  };
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({SomeEvaluation("rap"), SomeEvaluation("palu")}), 1);
  Evaluation other = SomeEvaluation("rap");
  other.text = "another";
  EXPECT_EQ(count({SomeEvaluation("rap"), other}), 2);
  // Another text of the same name, and other windows of it.
  for (const int changed : {0, 1, 2}) {
    other = SomeEvaluation("rap");
    if (changed == 0) other.teacher.nats_per_token += 0.5;
    if (changed == 1) other.windows += 1;
    if (changed == 2) other.window_tokens += 1;
    EXPECT_EQ(count({SomeEvaluation("rap"), other}), 2) << changed;
  }
  EXPECT_THAT(ReportToHtml(report, {SomeEvaluation("rap")}),
              AllOf(HasSubstr("rap, 25.0 % of the numbers kept"),
                    HasSubstr("teacher: the &lt;teacher&gt;")));
}

TEST(InspectHtmlTest, AnEvaluationWithoutRowsIsDrawn) {
  Evaluation empty = SomeEvaluation("rap");
  empty.rows.clear();
  EXPECT_EQ(XmlError(ReportToHtml(ReportOf(SourceWith(kFullKey, kFullValue)),
                                  {empty})),
            "");
}

}  // namespace
}  // namespace kvasir::cli
