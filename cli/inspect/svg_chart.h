// Small charts as SVG text: stacked columns, stacked rows, lines with error
// bars. Colours come from the page's style (ChartStyle), so that one drawing
// suits light and dark.
//
// Every text that is passed in is escaped here. Values that are not finite are
// drawn as 0, those beyond 1e100 as that.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::cli {

// For text and attribute values: markup characters become entities; control
// characters and bytes that are no UTF-8 become U+FFFD.
std::string EscapeXml(std::string_view text);

// Rules for the classes that charts use, for a <style> element.
std::string ChartStyle();

// Colours repeat after so many series.
inline constexpr int kChartColors = 8;

// Writes an axis value.
using AxisFormat = std::function<std::string(double)>;
std::string PlainNumber(double value);  // "1,024", "0.05"

struct ChartPiece {
  double value = 0;  // >= 0
  int color = 0;
  std::string title;  // shown while the pointer rests on it
};

// A line across the chart.
struct ChartReference {
  double value = 0;
  std::string label;
};

struct ColumnChart {
  struct Column {
    std::string label;
    std::vector<std::vector<ChartPiece>> bars;  // side by side, pieces stacked
  };
  std::string name;  // what the chart shows, for those who cannot see it
  std::string x_label;
  std::string y_label;
  std::vector<Column> columns;
  std::optional<ChartReference> reference;
};
std::string DrawColumns(const ColumnChart& chart);

struct RowChart {
  struct Row {
    std::string label;
    std::vector<ChartPiece> pieces;
    std::string end_label;  // after the bar
  };
  std::string name;
  std::vector<Row> rows;
  bool shares = false;  // every row is as long as its whole
};
std::string DrawRows(const RowChart& chart);

struct LineChart {
  struct Point {
    double x = 0;
    double y = 0;
    std::optional<double> low;  // error bar, with high
    std::optional<double> high;
    std::string title;
  };
  struct Series {
    std::vector<Point> points;
    bool markers = true;  // else only on the last point
  };
  std::string name;
  std::string x_label;
  std::string y_label;
  std::vector<Series> series;  // series i has colour and marker i
  std::optional<ChartReference> reference;
  AxisFormat x_format = PlainNumber;
  AxisFormat y_format = PlainNumber;
  // Small and large values on one axis: linear near 0, logarithmic far from it.
  bool symmetric_log = false;
};
std::string DrawLines(const LineChart& chart);

// Names beside the colours (and, of lines, markers) of their series.
struct LegendItem {
  std::string name;
  int series = 0;
};
std::string DrawLegend(const std::vector<LegendItem>& items, bool lines);

}  // namespace kvasir::cli
