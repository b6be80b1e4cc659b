#include "cli/inspect/svg_chart.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::cli {
namespace {

constexpr double kWidth = 960;
constexpr double kLeft = 76;
constexpr double kRight = 18;
constexpr double kTop = 18;
constexpr double kBottom = 46;
constexpr double kMostBarWidth = 34;
constexpr int kMarkers = 4;

// What charts compute with: far from where sums overflow and steps vanish.
double Finite(double value) {
  constexpr double kMost = 1e100;
  if (!std::isfinite(value) || std::abs(value) < 1 / kMost) return 0;
  return std::clamp(value, -kMost, kMost);
}

// Whether a page may hold the character.
bool IsAllowed(char32_t c) {
  if (c < 0x20) return c == '\n' || c == '\t';
  return (c < 0x7f || c >= 0xa0) && c != 0xfffe && c != 0xffff;
}

// A step of 1, 2 or 5 times a power of ten, `count` of which reach `span`.
double NiceStep(double span, int count) {
  const double rough = span / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

// An axis from data to pixels.
class Axis {
 public:
  // Linear, from tick to tick.
  static Axis Rounded(double low, double high, double from, double to) {
    if (!(high > low)) high = low + 1;
    const double step = NiceStep(high - low, 5);
    Axis axis(std::floor(low / step + 1e-9) * step,
              std::ceil(high / step - 1e-9) * step, from, to, 0);
    axis.AddTicks(step);
    return axis;
  }

  // Linear, as far as the data goes.
  static Axis Exact(double low, double high, double from, double to) {
    if (!(high > low)) high = low + 1;
    Axis axis(low, high, from, to, 0);
    axis.AddTicks(NiceStep(high - low, 6));
    return axis;
  }

  static Axis SymmetricLog(double low, double high, double scale, double from,
                           double to) {
    Axis axis(low, high, from, to, scale);
    const double least = std::pow(10.0, std::ceil(std::log10(scale)));
    for (double tick = least; tick <= -low; tick *= 10) {
      axis.ticks_.insert(axis.ticks_.begin(), -tick);
    }
    axis.ticks_.push_back(0);
    for (double tick = least; tick <= high * (1 + 1e-9); tick *= 10) {
      axis.ticks_.push_back(tick);
    }
    return axis;
  }

  double At(double value) const {
    const double low = Warp(low_), high = Warp(high_);
    const double share = (Warp(Finite(value)) - low) / (high - low);
    return from_ + std::clamp(share, 0.0, 1.0) * (to_ - from_);
  }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  // `scale` 0: linear.
  Axis(double low, double high, double from, double to, double scale)
      : scale_(scale), low_(low), high_(high), from_(from), to_(to) {}

  void AddTicks(double step) {
    for (double tick = std::ceil(low_ / step - 1e-9) * step;
         tick <= high_ + step / 1000; tick += step) {
      ticks_.push_back(std::abs(tick) < step / 1000 ? 0 : tick);
    }
  }

  double Warp(double value) const {
    return scale_ > 0 ? std::asinh(value / scale_) : value;
  }

  double scale_;
  double low_, high_;
  double from_, to_;
  std::vector<double> ticks_;
};

std::string Open(double height, const std::string& name) {
  return absl::StrFormat(
      "<svg class=\"chart\" viewBox=\"0 0 %.0f %.0f\" role=\"img\" "
      "aria-label=\"%s\" xmlns=\"http://www.w3.org/2000/svg\">\n",
      kWidth, height, EscapeXml(name));
}

void Line(double x1, double y1, double x2, double y2, std::string_view kind,
          std::string* out) {
  absl::StrAppendFormat(
      out,
      "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n",
      kind, x1, y1, x2, y2);
}

void Text(double x, double y, std::string_view anchor, std::string_view kind,
          const std::string& text, std::string* out) {
  absl::StrAppendFormat(
      out, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s",
      kind, x, y, anchor, EscapeXml(text));
  absl::StrAppend(out, "</text>\n");
}

void Title(const std::string& title, std::string* out) {
  if (title.empty()) return;
  absl::StrAppend(out, "<title>", EscapeXml(title), "</title>");
}

void Piece(double x, double y, double width, double height,
           const ChartPiece& piece, std::string* out) {
  absl::StrAppendFormat(
      out,
      "<rect class=\"piece f%d\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" "
      "height=\"%.2f\">",
      piece.color % kChartColors, x, y, width, height);
  Title(piece.title, out);
  absl::StrAppend(out, "</rect>\n");
}

// Horizontal grid, its labels, and the names of both axes.
void Frame(const Axis& y, double height, const AxisFormat& format,
           const std::string& x_label, const std::string& y_label,
           std::string* out) {
  for (const double tick : y.ticks()) {
    Line(kLeft, y.At(tick), kWidth - kRight, y.At(tick),
         tick == 0 ? "axis" : "grid", out);
    Text(kLeft - 8, y.At(tick) + 4, "end", "tick", format(tick), out);
  }
  Text((kLeft + kWidth - kRight) / 2, height - 8, "middle", "label", x_label,
       out);
  const double middle = (kTop + height - kBottom) / 2;
  absl::StrAppendFormat(
      out,
      "<text class=\"label\" text-anchor=\"middle\" transform=\"translate(14 "
      "%.1f) rotate(-90)\">%s</text>\n",
      middle, EscapeXml(y_label));
}

void Reference(const ChartReference& reference, const Axis& y,
               std::string* out) {
  const double at = y.At(reference.value);
  Line(kLeft, at, kWidth - kRight, at, "reference", out);
  Text(kWidth - kRight - 4, at - 6, "end", "tick", reference.label, out);
}

std::string MarkerShape(int series, double x, double y,
                        const std::string& title) {
  std::string shape;
  const int marker = (series + series / kChartColors) % kMarkers;
  const int color = series % kChartColors;
  switch (marker) {
    case 0:
      shape = absl::StrFormat(
          "<circle class=\"f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\">", color, x,
          y);
      break;
    case 1:
      shape = absl::StrFormat(
          "<rect class=\"f%d\" x=\"%.1f\" y=\"%.1f\" width=\"8\" "
          "height=\"8\">",
          color, x - 4, y - 4);
      break;
    case 2:
      shape =
          absl::StrFormat("<path class=\"f%d\" d=\"M%.1f %.1fl5.5 9.5h-11z\">",
                          color, x, y - 6);
      break;
    default:
      shape = absl::StrFormat(
          "<path class=\"f%d\" d=\"M%.1f %.1fl5.5 5.5l-5.5 5.5l-5.5 -5.5z\">",
          color, x, y - 5.5);
      break;
  }
  Title(title, &shape);
  absl::StrAppend(&shape,
                  marker == 0   ? "</circle>"
                  : marker == 1 ? "</rect>"
                                : "</path>",
                  "\n");
  return shape;
}

struct Extent {
  double low = 0;
  double high = 0;
  double least = 0;  // smallest distance from 0 that is not 0

  void Cover(double value) {
    low = std::min(low, Finite(value));
    high = std::max(high, Finite(value));
  }
  void Take(double value) {
    Cover(value);
    const double distance = std::abs(Finite(value));
    if (distance > 0) least = least == 0 ? distance : std::min(least, distance);
  }
};

void DrawSeries(const LineChart::Series& series, int index, const Axis& x,
                const Axis& y, std::string* out) {
  std::string path;
  for (const LineChart::Point& point : series.points) {
    absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : "L",
                          x.At(point.x), y.At(point.y));
  }
  if (path.empty()) return;
  absl::StrAppendFormat(out, "<path class=\"line s%d%s\" d=\"%s\"/>\n",
                        index % kChartColors,
                        index >= kChartColors ? " dashed" : "", path);
  for (const LineChart::Point& point : series.points) {
    const double at = x.At(point.x);
    if (point.low.has_value() && point.high.has_value()) {
      const std::string kind = absl::StrCat("bar s", index % kChartColors);
      const double low = y.At(*point.low), high = y.At(*point.high);
      Line(at, low, at, high, kind, out);
      Line(at - 4, low, at + 4, low, kind, out);
      Line(at - 4, high, at + 4, high, kind, out);
    }
    if (series.markers || &point == &series.points.back()) {
      absl::StrAppend(out, MarkerShape(index, at, y.At(point.y), point.title));
    }
  }
}

}  // namespace

std::string EscapeXml(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const model::Utf8Char first = model::FirstChar(text);
    if (first.kind != model::Utf8Kind::kValid || !IsAllowed(first.value)) {
      out += model::kReplacement;
      text.remove_prefix(1);
      continue;
    }
    switch (text[0]) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += text.substr(0, first.size);
    }
    text.remove_prefix(first.size);
  }
  return out;
}

std::string ChartStyle() {
  constexpr const char* kLight[kChartColors] = {"#2b6cb0", "#d9701a", "#2f8a5b",
                                                "#7c55c8", "#c2356b", "#0f8790",
                                                "#8f7016", "#64748b"};
  constexpr const char* kDark[kChartColors] = {"#6aaef2", "#f3a35e", "#62c793",
                                               "#b79ff6", "#f0769f", "#4cc7cc",
                                               "#d6b653", "#98a6b8"};
  const auto colors = [](const char* const* values) {
    std::string text = ":root{";
    for (int i = 0; i < kChartColors; ++i) {
      absl::StrAppend(&text, "--c", i, ":", values[i], ";");
    }
    return text + "}\n";
  };
  std::string style = colors(kLight);
  absl::StrAppend(&style, "@media (prefers-color-scheme:dark){", colors(kDark),
                  "}\n");
  for (int i = 0; i < kChartColors; ++i) {
    absl::StrAppend(&style, ".f", i, "{fill:var(--c", i, ")}.s", i,
                    "{stroke:var(--c", i, ")}\n");
  }
  absl::StrAppend(
      &style,
      "svg.chart{display:block;width:100%;min-width:640px;height:auto}\n"
      "svg text{font:12px system-ui,sans-serif;fill:var(--muted)}\n"
      "svg text.strong{fill:var(--text);font-weight:600}\n"
      ".grid{stroke:var(--rule)}.axis{stroke:var(--muted)}\n"
      ".reference{stroke:var(--text);stroke-dasharray:6 4;opacity:.7}\n"
      ".line{fill:none;stroke-width:2.2;stroke-linejoin:round}\n"
      ".dashed{stroke-dasharray:7 4}.bar{stroke-width:1.4}\n"
      ".piece{stroke:var(--card);stroke-width:.7}.piece:hover{opacity:.75}\n"
      ".legend{display:flex;flex-wrap:wrap;gap:.3em 1.3em;padding:0;margin:"
      ".2em 0 .6em;list-style:none;font-size:.86rem}\n"
      ".legend li{display:flex;align-items:center;gap:.45em;min-width:0;"
      "overflow-wrap:anywhere}\n"
      ".legend svg{width:26px;height:14px;flex:none}\n");
  return style;
}

std::string PlainNumber(double value) {
  if (std::abs(value) < 1000 || !(std::abs(value) < 1e15)) {
    return absl::StrFormat("%.4g", value);
  }
  const std::string digits = absl::StrFormat("%.0f", std::abs(value));
  std::string out(value < 0 ? "-" : "");
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

std::string DrawColumns(const ColumnChart& chart) {
  constexpr double kHeight = 320;
  double most = chart.reference.has_value() ? chart.reference->value : 0;
  size_t bars = 1;
  for (const ColumnChart::Column& column : chart.columns) {
    bars = std::max(bars, column.bars.size());
    for (const auto& bar : column.bars) {
      double sum = 0;
      for (const ChartPiece& piece : bar) sum += Finite(piece.value);
      most = std::max(most, sum);
    }
  }
  const Axis y = Axis::Rounded(0, most, kHeight - kBottom, kTop);
  std::string out = Open(kHeight, chart.name);
  Frame(y, kHeight, PlainNumber, chart.x_label, chart.y_label, &out);

  const auto count =
      static_cast<double>(std::max<size_t>(1, chart.columns.size()));
  const double slot = (kWidth - kLeft - kRight) / count;
  const double bar_width =
      std::min(kMostBarWidth, slot * 0.82 / static_cast<double>(bars));
  // As many labels as there is room for.
  const auto every = static_cast<size_t>(std::ceil(count / 40));
  for (size_t c = 0; c < chart.columns.size(); ++c) {
    const ColumnChart::Column& column = chart.columns[c];
    const double middle = kLeft + slot * (static_cast<double>(c) + 0.5);
    double left =
        middle - bar_width * static_cast<double>(column.bars.size()) / 2;
    for (const auto& bar : column.bars) {
      double sum = 0;
      for (const ChartPiece& piece : bar) {
        const double top = y.At(sum + Finite(piece.value));
        Piece(left, top, bar_width, y.At(sum) - top, piece, &out);
        sum += Finite(piece.value);
      }
      left += bar_width;
    }
    if (c % every == 0) {
      Text(middle, kHeight - kBottom + 16, "middle", "tick", column.label,
           &out);
    }
  }
  if (chart.reference.has_value()) Reference(*chart.reference, y, &out);
  return out + "</svg>\n";
}

std::string DrawRows(const RowChart& chart) {
  constexpr double kRowHeight = 34, kBarHeight = 22;
  constexpr double kLabelWidth = 150, kEndWidth = 150;
  double most = 0;
  for (const RowChart::Row& row : chart.rows) {
    double sum = 0;
    for (const ChartPiece& piece : row.pieces) sum += Finite(piece.value);
    most = std::max(most, sum);
  }
  const double height = kRowHeight * static_cast<double>(chart.rows.size()) + 8;
  const double width = kWidth - kLabelWidth - kEndWidth;
  std::string out = Open(height, chart.name);
  for (size_t r = 0; r < chart.rows.size(); ++r) {
    const RowChart::Row& row = chart.rows[r];
    double whole = most;
    if (chart.shares) {
      whole = 0;
      for (const ChartPiece& piece : row.pieces) whole += Finite(piece.value);
    }
    const double top =
        4 + kRowHeight * static_cast<double>(r) + (kRowHeight - kBarHeight) / 2;
    Text(kLabelWidth - 10, top + 15, "end", "strong", row.label, &out);
    double left = kLabelWidth;
    for (const ChartPiece& piece : row.pieces) {
      const double length = whole > 0 ? Finite(piece.value) / whole * width : 0;
      if (length > 0) Piece(left, top, length, kBarHeight, piece, &out);
      left += length;
    }
    Text(left + 8, top + 15, "start", "tick", row.end_label, &out);
  }
  return out + "</svg>\n";
}

std::string DrawLines(const LineChart& chart) {
  constexpr double kHeight = 380;
  Extent xs, ys, noise;
  for (const LineChart::Series& series : chart.series) {
    for (const LineChart::Point& point : series.points) {
      xs.Take(point.x);
      ys.Take(point.y);
      if (!point.low.has_value() || !point.high.has_value()) continue;
      noise.Take((*point.high - *point.low) / 2);
      ys.Cover(*point.low);
      ys.Cover(*point.high);
    }
  }
  if (chart.reference.has_value()) ys.Cover(chart.reference->value);
  const double bottom = kHeight - kBottom;
  const Axis x = Axis::Exact(xs.low, xs.high, kLeft, kWidth - kRight - 8);
  // Linear where the noise is: as far as the shortest error bar reaches.
  const double scale =
      std::max({ys.least, noise.least, std::max(ys.high, -ys.low) * 1e-4});
  const Axis y = chart.symmetric_log && scale > 0
                     ? Axis::SymmetricLog(ys.low * 1.15, ys.high * 1.15, scale,
                                          bottom, kTop)
                     : Axis::Rounded(ys.low, ys.high, bottom, kTop);
  std::string out = Open(kHeight, chart.name);
  Frame(y, kHeight, chart.y_format, chart.x_label, chart.y_label, &out);
  for (const double tick : x.ticks()) {
    Line(x.At(tick), bottom, x.At(tick), bottom + 5, "axis", &out);
    Text(x.At(tick), bottom + 18, "middle", "tick", chart.x_format(tick), &out);
  }
  if (chart.reference.has_value()) Reference(*chart.reference, y, &out);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    DrawSeries(chart.series[i], static_cast<int>(i), x, y, &out);
  }
  return out + "</svg>\n";
}

std::string DrawLegend(const std::vector<LegendItem>& items, bool lines) {
  std::string out = "<ul class=\"legend\">\n";
  for (const LegendItem& item : items) {
    const int color = item.series % kChartColors;
    absl::StrAppend(&out,
                    "<li><svg viewBox=\"0 0 26 14\" "
                    "xmlns=\"http://www.w3.org/2000/svg\" "
                    "aria-hidden=\"true\">");
    if (lines) {
      absl::StrAppendFormat(&out, "<path class=\"line s%d%s\" d=\"M0 7h26\"/>",
                            color,
                            item.series >= kChartColors ? " dashed" : "");
      absl::StrAppend(&out, MarkerShape(item.series, 13, 7, ""));
    } else {
      absl::StrAppendFormat(&out,
                            "<rect class=\"f%d\" x=\"6\" y=\"0\" width=\"14\" "
                            "height=\"14\" rx=\"2\"/>",
                            color);
    }
    absl::StrAppend(&out, "</svg>", EscapeXml(item.name), "</li>\n");
  }
  return out + "</ul>\n";
}

}  // namespace kvasir::cli
