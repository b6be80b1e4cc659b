#include "cli/inspect/svg_chart.h"

#include <limits>

#include "cli/inspect/xml_check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

int CountOf(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != text.npos;
       at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

TEST(SvgChartTest, TextsAreEscaped) {
  EXPECT_EQ(EscapeXml("<a href=\"x\">'&'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
  EXPECT_EQ(EscapeXml("Grüße €"), "Grüße €");
  EXPECT_EQ(EscapeXml("two\nlines"), "two\nlines");
}

TEST(SvgChartTest, WhatIsNoTextIsReplaced) {
  const std::string replaced = "\xef\xbf\xbd";
  EXPECT_EQ(EscapeXml(std::string("a\0b", 3)), "a" + replaced + "b");
  EXPECT_EQ(EscapeXml("\x1b[31m"), replaced + "[31m");
  EXPECT_EQ(EscapeXml("\xff"), replaced);
  EXPECT_EQ(EscapeXml("\xe2\x82"), replaced + replaced);  // cut short
  EXPECT_EQ(EscapeXml("\xc0\xaf"), replaced + replaced);  // overlong
  // A surrogate, and a character that XML does not have.
  EXPECT_EQ(EscapeXml("\xed\xa0\x80"), replaced + replaced + replaced);
  EXPECT_EQ(EscapeXml("\xef\xbf\xbf"), replaced + replaced + replaced);
}

TEST(SvgChartTest, NumbersHaveThousands) {
  EXPECT_EQ(PlainNumber(0), "0");
  EXPECT_EQ(PlainNumber(0.05), "0.05");
  EXPECT_EQ(PlainNumber(999), "999");
  EXPECT_EQ(PlainNumber(1000), "1,000");
  EXPECT_EQ(PlainNumber(-1234567), "-1,234,567");
  EXPECT_EQ(PlainNumber(2e20), "2e+20");
}

TEST(SvgChartTest, ColumnsHaveAPiecePerValueWithItsTitle) {
  ColumnChart chart;
  chart.name = "a \"chart\"";
  chart.columns = {{"0", {{{3, 0, "first"}, {4, 0, "<second>"}}, {{5, 1, ""}}}},
                   {"1", {{{2, 0, "third"}}}}};
  chart.reference = {9, "most"};
  const std::string svg = DrawColumns(chart);
  EXPECT_EQ(XmlError(svg), "");
  EXPECT_EQ(CountOf(svg, "class=\"piece"), 4);
  EXPECT_THAT(svg, AllOf(HasSubstr("<title>first</title>"),
                         HasSubstr("<title>&lt;second&gt;</title>"),
                         HasSubstr("a &quot;chart&quot;"), HasSubstr("most")));
}

TEST(SvgChartTest, HeightsAreInProportion) {
  ColumnChart chart;
  chart.columns = {{"", {{{50, 0, ""}}}}, {"", {{{100, 0, ""}}}}};
  const std::string svg = DrawColumns(chart);
  // 320 high, 46 below, 18 above.
  EXPECT_THAT(svg, AllOf(HasSubstr("height=\"128.00\""),
                         HasSubstr("height=\"256.00\"")));
}

TEST(SvgChartTest, RowsOfSharesAreAsLongAsEachOther) {
  RowChart chart;
  chart.rows = {{"a", {{1, 0, ""}}, "1"}, {"b", {{10, 0, ""}}, "10"}};
  const std::string full = "width=\"660.00\"";
  EXPECT_EQ(CountOf(DrawRows(chart), full), 1);
  chart.shares = true;
  EXPECT_EQ(CountOf(DrawRows(chart), full), 2);
}

TEST(SvgChartTest, LinesHaveMarkersAndErrorBars) {
  LineChart chart;
  chart.series.resize(9);
  for (int i = 0; i < 9; ++i) {
    chart.series[static_cast<size_t>(i)].points = {
        {1, 0.001 * i, 0.0, 0.002 * i, "point"}, {2, 0.5 * i, {}, {}, ""}};
  }
  chart.reference = {0, "teacher"};
  for (const bool logarithmic : {false, true}) {
    chart.symmetric_log = logarithmic;
    const std::string svg = DrawLines(chart);
    EXPECT_EQ(XmlError(svg), "");
    EXPECT_EQ(CountOf(svg, "class=\"bar"), 9 * 3);
    EXPECT_EQ(CountOf(svg, "<title>point</title>"), 9);
    EXPECT_EQ(CountOf(svg, "dashed"), 1);  // the ninth: its colour comes again
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
  }
}

TEST(SvgChartTest, OddValuesGiveNoOddDrawing) {
  for (const double odd :
       {kNan, kInfinity, -kInfinity, 0.0, -3.0, 1e300,
        std::numeric_limits<double>::max(), -std::numeric_limits<double>::max(),
        std::numeric_limits<double>::denorm_min()}) {
    SCOPED_TRACE(odd);
    LineChart lines;
    lines.series = {{{{odd, odd, odd, odd, ""}, {1, 2, {}, {}, ""}}}};
    lines.symmetric_log = true;
    LineChart alone;
    alone.series = {{{{odd, odd, {}, {}, ""}}}};
    ColumnChart columns;
    columns.columns = {{"", {{{std::abs(odd), 0, ""}}}}};
    RowChart rows;
    rows.rows = {{"", {{std::abs(odd), 0, ""}}, ""}};
    for (const std::string& svg : {DrawLines(lines), DrawLines(alone),
                                   DrawColumns(columns), DrawRows(rows)}) {
      EXPECT_EQ(XmlError(svg), "");
      EXPECT_THAT(svg, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
      EXPECT_LT(svg.size(), 100000u);
    }
  }
}

TEST(SvgChartTest, EmptyChartsAreDrawn) {
  EXPECT_EQ(XmlError(DrawColumns({})), "");
  EXPECT_EQ(XmlError(DrawRows({})), "");
  EXPECT_EQ(XmlError(DrawLines({})), "");
  EXPECT_EQ(XmlError(DrawLegend({}, true)), "");
  EXPECT_EQ(XmlError(DrawLegend({{"a<b", 0}, {"c", 11}}, true)), "");
}

TEST(XmlCheckTest, FindsWhatIsNotWellFormed) {
  EXPECT_EQ(XmlError("<a b=\"1\"><c/>x &amp; y</a>"), "");
  for (const char* text : {"<a>", "<a></b>", "<a b=1/>", "x & y", "<a b=\"/>",
                           "</a>", "<a", "<a b=\"<\"/>"}) {
    EXPECT_NE(XmlError(text), "") << text;
  }
}

}  // namespace
}  // namespace kvasir::cli
