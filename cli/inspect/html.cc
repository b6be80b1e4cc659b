#include "cli/inspect/html.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cli/inspect/svg_chart.h"
#include "cli/units.h"
#include "cli/version.h"

namespace kvasir::cli {
namespace {

// Above it the groups of a side are drawn as one piece: a page of a large model
// with a latent per head would be megabytes.
constexpr size_t kMostPieces = 6000;

constexpr char kPageStyle[] =
    ":root{color-scheme:light dark;--page:#f4f6f8;--card:#fff;--text:#17202b;"
    "--muted:#5a6675;--rule:#dde3ea}\n"
    "@media (prefers-color-scheme:dark){:root{--page:#0f1318;--card:#171d25;"
    "--text:#e8edf3;--muted:#9aa7b6;--rule:#2b3541}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--page);color:var(--text);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\n"
    "main{max-width:1080px;margin:0 auto;padding:1.6rem 1rem 3rem}\n"
    "h1{font-size:1.55rem;line-height:1.25;margin:0;overflow-wrap:anywhere}\n"
    "h2{font-size:1.08rem;margin:0 0 .3rem}\n"
    "h3{font-size:.95rem;margin:1.1rem 0 .3rem}\n"
    "p{margin:.2rem 0 .7rem}.sub,.note{color:var(--muted);"
    "overflow-wrap:anywhere}.note{font-size:.88rem}\n"
    "section{background:var(--card);border:1px solid var(--rule);"
    "border-radius:10px;padding:1rem 1.1rem;margin:1rem 0}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,"
    "1fr));gap:.8rem;margin:1.1rem 0}\n"
    ".tile{background:var(--card);border:1px solid var(--rule);"
    "border-radius:10px;padding:.7rem .9rem}\n"
    ".tile b{display:block;font-size:1.4rem;line-height:1.3;"
    "font-variant-numeric:tabular-nums}\n"
    ".tile span{display:block;font-size:.82rem;color:var(--muted)}\n"
    ".tile span:first-child{min-height:2.6em}\n"
    ".scroll{overflow-x:auto}\n"
    "table{border-collapse:collapse;width:100%;font-size:.86rem;"
    "font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:left;padding:.28rem .6rem;border-bottom:1px solid "
    "var(--rule);white-space:nowrap}\n"
    "th{color:var(--muted);font-weight:600}td.n,th.n{text-align:right}\n"
    "td.wrap{white-space:normal;overflow-wrap:anywhere}\n"
    "td.name{white-space:normal;overflow-wrap:anywhere;min-width:9rem}\n"
    "summary{cursor:pointer;font-weight:600}\n"
    "footer{color:var(--muted);font-size:.82rem;margin-top:1.5rem}\n";

std::string Bytes(double bytes) { return HumanBytes(bytes); }
std::string Bytes(int64_t bytes) {
  return HumanBytes(static_cast<double>(bytes));
}

std::string Count(int64_t value) {
  return PlainNumber(static_cast<double>(value));
}

std::string Percent(double share) {
  return absl::StrFormat("%.1f %%", 100 * share);
}

std::string Ratio(double numerator, double denominator) {
  return denominator > 0 ? absl::StrFormat("%.2f×", numerator / denominator)
                         : "-";
}

// A table cell; numbers stand right.
std::string Cell(const std::string& text, std::string_view kind = "") {
  return absl::StrFormat(
      "<td%s>%s</td>",
      kind.empty() ? "" : absl::StrFormat(" class=\"%s\"", kind),
      EscapeXml(text));
}
std::string Number(const std::string& text) { return Cell(text, "n"); }

// Headers that begin with '#' stand over numbers.
std::string TableHead(const std::vector<std::string>& headers) {
  std::string out = "<div class=\"scroll\"><table><thead><tr>";
  for (const std::string& header : headers) {
    const bool number = header.starts_with('#');
    absl::StrAppend(&out, number ? "<th class=\"n\">" : "<th>",
                    EscapeXml(header.substr(number ? 1 : 0)), "</th>");
  }
  return out + "</tr></thead><tbody>\n";
}
constexpr char kTableEnd[] = "</tbody></table></div>\n";

std::string Scrolled(const std::string& chart) {
  return absl::StrCat("<div class=\"scroll\">", chart, "</div>\n");
}

std::string Tile(const std::string& label, const std::string& value,
                 const std::string& note) {
  return absl::StrFormat(
      "<div class=\"tile\"><span>%s</span><b>%s</b><span>%s</span></div>\n",
      EscapeXml(label), EscapeXml(value), EscapeXml(note));
}

std::string Header(const InspectReport& report) {
  std::string out = absl::StrFormat("<h1>%s</h1>\n", EscapeXml(report.name));
  std::string sub = absl::StrFormat(
      "%s, %d layer%s, %d query and %d KV heads of %d. Plan: %s",
      report.model_type, report.num_layers, report.num_layers == 1 ? "" : "s",
      report.num_heads, report.num_kv_heads, report.head_dim,
      report.method.empty() ? "(unnamed)" : report.method);
  if (!report.base_model.empty()) {
    absl::StrAppend(&sub, ", made for ", report.base_model);
  }
  absl::StrAppend(&out, "<p class=\"sub\">", EscapeXml(sub), ".</p>\n");
  if (!report.weights_fit) {
    absl::StrAppend(&out,
                    "<p class=\"note\">The folder holds other weights: these "
                    "are the figures that the plan would have once it is "
                    "applied.</p>\n");
  }
  if (!report.not_served.empty()) {
    absl::StrAppend(&out, "<p class=\"note\">Not served: ",
                    EscapeXml(report.not_served), ".</p>\n");
  }
  return out;
}

std::string Tiles(const InspectReport& report) {
  const worker::SideFlops flops = report.flops();
  const int64_t dense_flops = 2 * report.num_layers * report.dense_side_flops;
  std::string out = "<div class=\"tiles\">\n";
  absl::StrAppend(
      &out,
      Tile("KV bytes per token", PlainNumber(report.bytes_per_token),
           absl::StrCat("dense bf16: ", Count(report.dense_bytes_per_token))),
      Tile("tokens in the same memory",
           absl::StrFormat("%.2f×", report.compression_ratio),
           "against dense bf16"),
      Tile("weights",
           report.weights.bytes > 0 ? Bytes(report.weights.bytes) : "-",
           absl::StrCat("attention ", Bytes(report.weights.attention_bytes),
                        "; dense bf16 ", Bytes(report.dense_weights.bytes))),
      Tile("attention FLOPs per cached token", Count(flops.attention),
           absl::StrCat("for each query token; dense: ", Count(dense_flops))),
      Tile("reconstruction FLOPs", Count(flops.reconstruction),
           "per cached token, each time it is read"));
  return out + "</div>\n";
}

std::string HeadsText(const std::vector<int64_t>& heads) {
  if (heads.size() == 1) return absl::StrCat("head ", heads[0]);
  if (heads.back() - heads.front() + 1 == static_cast<int64_t>(heads.size())) {
    return absl::StrCat("heads ", heads.front(), "-", heads.back());
  }
  return absl::StrCat("heads ", absl::StrJoin(heads, ","));
}

std::string SideTitle(const LayerSideSummary& side) {
  return absl::StrFormat("layer %d %s: %s, %s numbers (%s) as %s, lift %s",
                         side.layer, side.side, side.method, Count(side.rank),
                         side.groups, side.bits, side.lift);
}

// Keys are colour 0, values 1, further parts of a key 2 and on.
int PartColor(const LayerSideSummary& side, int part) {
  if (side.side == "value") return 1;
  return part == 0 ? 0 : part + 1;
}

std::vector<ChartPiece> RankBar(const LayerSideSummary& side, bool per_group) {
  const std::string title = SideTitle(side);
  std::vector<ChartPiece> bar;
  for (const GroupSummary& group : side.group_list) {
    const int color = PartColor(side, group.part);
    const auto stored = static_cast<double>(group.stored);
    if (!per_group && !bar.empty() && bar.back().color == color) {
      bar.back().value += stored;
      continue;
    }
    bar.push_back({stored, color,
                   !per_group ? title
                              : absl::StrFormat("%s\n%s: %d of rank %d stored",
                                                title, HeadsText(group.heads),
                                                group.stored, group.rank)});
  }
  return bar;
}

std::string RankSection(const InspectReport& report) {
  ColumnChart chart;
  chart.name = "Numbers stored per token in each layer, keys and values";
  chart.x_label = "layer";
  chart.y_label = "numbers stored per token";
  const int64_t dense = report.num_kv_heads * report.head_dim;
  chart.reference = {static_cast<double>(dense),
                     absl::StrCat("whole heads: ", Count(dense))};
  size_t groups = 0;
  int parts = 1;
  for (const ReportSide& side : report.sides) {
    groups += side.summary.group_list.size();
    for (const GroupSummary& group : side.summary.group_list) {
      parts = std::max(parts, group.part + 1);
    }
  }
  for (const ReportSide& side : report.sides) {
    if (side.summary.side == "key") {
      chart.columns.push_back({absl::StrCat(side.summary.layer), {}});
    }
    chart.columns.back().bars.push_back(
        RankBar(side.summary, groups <= kMostPieces));
  }
  std::vector<LegendItem> names = {{parts > 1 ? "key, part 0" : "key", 0}};
  for (int part = 1; part < parts; ++part) {
    names.push_back({absl::StrCat("key, part ", part), part + 1});
  }
  names.push_back({"value", 1});
  return absl::StrCat(
      "<section><h2>Ranks over layers</h2>\n<p class=\"note\">What is stored "
      "of "
      "each token, a piece per head group. Rest the pointer on a piece for its "
      "heads and codec.</p>\n",
      DrawLegend(names, /*lines=*/false), Scrolled(DrawColumns(chart)),
      "</section>\n");
}

constexpr std::array<const char*, 7> kComponents = {
    "keys",    "values",         "scales and minima", "landmarks, metadata",
    "padding", "unfilled slots", "per sequence"};

template <typename T>
std::array<T, kComponents.size()> ComponentValues(const CacheBytes<T>& bytes) {
  return {bytes.key_codes,   bytes.value_codes, bytes.parameters,
          bytes.annotations, bytes.padding,     bytes.unfilled,
          bytes.per_sequence};
}

template <typename T>
std::vector<ChartPiece> ComponentPieces(const CacheBytes<T>& bytes) {
  const auto values = ComponentValues(bytes);
  std::vector<ChartPiece> pieces;
  for (size_t i = 0; i < kComponents.size(); ++i) {
    const auto value = static_cast<double>(values[i]);
    if (value <= 0) continue;
    pieces.push_back(
        {value, static_cast<int>(i),
         absl::StrCat(kComponents[i], ": ", Bytes(value), " (",
                      Percent(value / static_cast<double>(bytes.total())),
                      ")")});
  }
  return pieces;
}

std::vector<LegendItem> UsedComponents(const InspectReport& report) {
  std::vector<LegendItem> used;
  for (size_t i = 0; i < kComponents.size(); ++i) {
    bool any = ComponentValues(report.token)[i] > 0;
    for (const ReportLength& length : report.at_length) {
      any = any || ComponentValues(length.cache)[i] > 0;
    }
    if (any) used.push_back({kComponents[i], static_cast<int>(i)});
  }
  return used;
}

std::string BytesSection(const InspectReport& report) {
  RowChart token;
  token.name = "Bytes of one more token by component, beside a dense cache";
  token.rows.push_back(
      {"this plan", ComponentPieces(report.token),
       absl::StrCat(PlainNumber(report.bytes_per_token), " bytes")});
  const auto dense_half = static_cast<double>(report.dense_bytes_per_token) / 2;
  token.rows.push_back(
      {"dense bf16",
       {{dense_half, 0, "keys"}, {dense_half, 1, "values"}},
       absl::StrCat(Count(report.dense_bytes_per_token), " bytes")});
  RowChart shares;
  shares.name = "What a sequence's cache is made of, by its length";
  shares.shares = true;
  std::string table = TableHead(
      {"#tokens", "#codes", "#scales, minima", "#padding, unfilled",
       "#per sequence", "#KV cache", "#dense bf16", "#ratio", "#weights + KV"});
  for (const ReportLength& length : report.at_length) {
    const CacheBytes<int64_t>& cache = length.cache;
    shares.rows.push_back({absl::StrCat(Count(length.tokens), " tokens"),
                           ComponentPieces(cache), Bytes(cache.total())});
    absl::StrAppend(
        &table, "<tr>", Number(Count(length.tokens)),
        Number(Bytes(cache.key_codes + cache.value_codes + cache.annotations)),
        Number(Bytes(cache.parameters)),
        Number(Bytes(cache.padding + cache.unfilled)),
        Number(Bytes(cache.per_sequence)), Number(Bytes(cache.total())),
        Number(Bytes(length.dense_bytes)),
        Number(Ratio(static_cast<double>(length.dense_bytes),
                     static_cast<double>(cache.total()))),
        Number(report.weights.bytes > 0
                   ? Bytes(report.weights.bytes + cache.total())
                   : "-"),
        "</tr>\n");
  }
  return absl::StrCat("<section><h2>Bytes by component</h2>\n",
                      DrawLegend(UsedComponents(report), /*lines=*/false),
                      "<h3>One more token</h3>\n", Scrolled(DrawRows(token)),
                      "<h3>One sequence, shares of its cache</h3>\n",
                      Scrolled(DrawRows(shares)), table, kTableEnd,
                      "</section>\n");
}

// A unit of bytes that suits values up to `most`.
struct ByteUnit {
  std::string name = "bytes";
  double bytes = 1;
};
ByteUnit UnitFor(double most) {
  ByteUnit unit;
  for (const char* name : {"KiB", "MiB", "GiB", "TiB"}) {
    if (most / unit.bytes < 4096) break;
    unit = {name, unit.bytes * 1024};
  }
  return unit;
}

std::string MemorySection(const InspectReport& report) {
  if (report.weights.bytes == 0) return "";
  LineChart::Series plan, dense, weights;
  plan.markers = dense.markers = weights.markers = false;
  double most = 0;
  for (const ReportLength& length : report.curve) {
    const auto x = static_cast<double>(length.tokens);
    const auto own =
        static_cast<double>(report.weights.bytes + length.cache.total());
    const auto other =
        static_cast<double>(report.dense_weights.bytes + length.dense_bytes);
    plan.points.push_back({.x = x, .y = own});
    dense.points.push_back({.x = x, .y = other});
    weights.points.push_back(
        {.x = x, .y = static_cast<double>(report.weights.bytes)});
    most = std::max({most, own, other});
  }
  const ByteUnit unit = UnitFor(most);
  for (LineChart::Series* series : {&plan, &dense, &weights}) {
    for (LineChart::Point& point : series->points) point.y /= unit.bytes;
  }
  LineChart chart;
  chart.name = "Weights and KV cache of one sequence over its length";
  chart.x_label = "tokens of one sequence";
  chart.y_label = unit.name;
  chart.series = {std::move(plan), std::move(dense), std::move(weights)};
  return absl::StrCat(
      "<section><h2>Weights and KV cache over context length</h2>\n",
      DrawLegend({{"this plan: weights + KV", 0},
                  {"dense bf16: weights + KV", 1},
                  {"this plan: weights alone", 2}},
                 /*lines=*/true),
      Scrolled(DrawLines(chart)), "</section>\n");
}

std::string PointTitle(const EvaluationRow& row) {
  return absl::StrFormat(
      "%s\n%s, %s of the numbers kept\n%s KV bytes per token\n%+.5f nats per "
      "token (95 %%: %+.5f to %+.5f)\nperplexity %.4f, top-1 agreement %s",
      row.model, row.method, Percent(row.keep),
      PlainNumber(row.kv_bytes_per_token), row.added_nats_per_token,
      row.added_low, row.added_high, row.perplexity,
      Percent(row.top1_agreement));
}

std::string QualityTable(const std::vector<const EvaluationRow*>& rows) {
  std::string out =
      TableHead({"method", "model", "#kept", "#KV bytes/token", "#added nats",
                 "#95 % from", "#to", "#perplexity", "#top-1", "#KL"});
  for (const EvaluationRow* row : rows) {
    const auto nats = [](double value) {
      return Number(absl::StrFormat("%+.5f", value));
    };
    absl::StrAppend(&out, "<tr>", Cell(row->method, "name"),
                    Cell(row->model, "name"), Number(Percent(row->keep)),
                    Number(PlainNumber(row->kv_bytes_per_token)),
                    nats(row->added_nats_per_token), nats(row->added_low),
                    nats(row->added_high),
                    Number(absl::StrFormat("%.4f", row->perplexity)),
                    Number(Percent(row->top1_agreement)),
                    Number(absl::StrFormat("%.5f", row->kl_nats)), "</tr>\n");
  }
  return out + kTableEnd;
}

// Evaluations of one teacher on the same windows of a text are drawn together.
std::string QualitySection(const std::vector<const Evaluation*>& evaluations) {
  const Evaluation& first = *evaluations.front();
  const EvaluationTeacher& teacher = first.teacher;
  std::map<std::string, std::vector<const EvaluationRow*>> methods;
  for (const Evaluation* evaluation : evaluations) {
    for (const EvaluationRow& row : evaluation->rows) {
      methods[row.method].push_back(&row);
    }
  }
  LineChart chart;
  chart.name = "Nats added per token against KV bytes per token, by method";
  chart.x_label = "KV bytes per token";
  chart.y_label = "added nats per token";
  chart.symmetric_log = true;
  chart.reference = {0, "teacher"};
  std::vector<LegendItem> names;
  std::vector<const EvaluationRow*> all;
  for (auto& [method, rows] : methods) {
    std::sort(rows.begin(), rows.end(),
              [](const EvaluationRow* a, const EvaluationRow* b) {
                return a->kv_bytes_per_token < b->kv_bytes_per_token;
              });
    LineChart::Series series;
    for (const EvaluationRow* row : rows) {
      series.points.push_back({row->kv_bytes_per_token,
                               row->added_nats_per_token, row->added_low,
                               row->added_high, PointTitle(*row)});
      all.push_back(row);
    }
    chart.series.push_back(std::move(series));
    names.push_back({method, static_cast<int>(names.size())});
  }
  chart.series.push_back(
      {{{.x = teacher.kv_bytes_per_token, .y = 0, .title = teacher.model}}});
  names.push_back({absl::StrCat("teacher: ", teacher.model),
                   static_cast<int>(names.size())});
  return absl::StrCat(
      "<section><h2>Quality against bytes</h2>\n<p class=\"note\">",
      EscapeXml(absl::StrFormat(
          "%s: %.5f nats per token, %.5f per byte, on %s in %s windows of %s "
          "tokens. Bars are 95 %% intervals; the scale is linear near 0 and "
          "logarithmic far from it.",
          teacher.model, teacher.nats_per_token, teacher.nats_per_byte,
          first.text, Count(first.windows), Count(first.window_tokens))),
      "</p>\n", DrawLegend(names, /*lines=*/true), Scrolled(DrawLines(chart)),
      "<details><summary>All ", all.size(), " measurements</summary>\n",
      QualityTable(all), "</details></section>\n");
}

std::string QualitySections(const std::vector<Evaluation>& evaluations) {
  // Texts of one name may differ: the teacher's loss tells them apart.
  using Ground = std::tuple<std::string, std::string, int64_t, int64_t, double>;
  std::map<Ground, std::vector<const Evaluation*>> by_teacher;
  for (const Evaluation& evaluation : evaluations) {
    by_teacher[{evaluation.teacher.model, evaluation.text, evaluation.windows,
                evaluation.window_tokens, evaluation.teacher.nats_per_token}]
        .push_back(&evaluation);
  }
  std::string out;
  for (const auto& [teacher, of_teacher] : by_teacher) {
    absl::StrAppend(&out, QualitySection(of_teacher));
  }
  return out;
}

std::string TableSection(const InspectReport& report) {
  std::string out =
      TableHead({"#layer", "side", "method", "#rank", "groups", "bits", "lift",
                 "stored", "range", "transform", "#bytes/token", "#scales",
                 "#attention", "#rebuild", "#window"});
  for (const ReportSide& side : report.sides) {
    const LayerSideSummary& row = side.summary;
    absl::StrAppend(
        &out, "<tr>", Number(absl::StrCat(row.layer)), Cell(row.side),
        Cell(row.method), Number(Count(row.rank)), Cell(row.groups),
        Cell(row.bits), Cell(row.lift), Cell(row.stored), Cell(row.range),
        Cell(row.transform), Number(PlainNumber(row.bytes_per_token)),
        Number(PlainNumber(row.param_bytes_per_token)),
        Number(Count(side.flops.attention)),
        Number(Count(side.flops.reconstruction)),
        Number(row.sliding_window == 0 ? "-" : Count(row.sliding_window)),
        "</tr>\n");
  }
  return absl::StrCat(
      "<section><details><summary>Rank table</summary>\n<p class=\"note\">"
      "Scales and minima are counted in bytes/token. Attention: FLOPs per "
      "query token and cached token; rebuild: per cached token, each time it "
      "is read; a dense side has ",
      Count(report.dense_side_flops), " and 0.</p>\n", out, kTableEnd,
      "</details></section>\n");
}

std::string ProvenanceSection(const InspectReport& report) {
  const auto& provenance = report.provenance;
  std::vector<std::pair<std::string, std::string>> rows = {
      {"method", report.method},
      {"made for", report.base_model},
      {"made by", provenance.tool_version()},
      {"options", provenance.options()},
      {"decomposition", provenance.decomposition()},
      {"calibration", provenance.calibration_id()}};
  if (provenance.seed() != 0) {
    rows.push_back({"seed", absl::StrCat(provenance.seed())});
  }
  if (report.target.kv_bytes_per_token() > 0) {
    rows.push_back(
        {"target", absl::StrCat(PlainNumber(report.target.kv_bytes_per_token()),
                                " KV bytes per token")});
  }
  if (report.target.tp() > 0) {
    rows.push_back({"planned for", absl::StrCat(report.target.tp(),
                                                " tensor-parallel ranks")});
  }
  rows.push_back({"page", absl::StrCat(report.page_tokens, " tokens")});
  std::string out =
      "<section><h2>Where the plan comes from</h2>\n<table><tbody>\n";
  for (const auto& [label, value] : rows) {
    if (value.empty()) continue;
    absl::StrAppend(&out, "<tr><th>", EscapeXml(label), "</th>",
                    Cell(value, "wrap"), "</tr>\n");
  }
  return out + "</tbody></table></section>\n";
}

}  // namespace

std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\" "
      "xmlns=\"http://www.w3.org/1999/xhtml\"><head><meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, "
      "initial-scale=1\"/>\n<title>",
      EscapeXml(report.name), ": ", EscapeXml(report.method),
      "</title>\n<style>\n", kPageStyle, ChartStyle(),
      "</style></head>\n<body><main>\n", Header(report), Tiles(report),
      RankSection(report), QualitySections(evaluations), BytesSection(report),
      MemorySection(report), TableSection(report), ProvenanceSection(report),
      "<footer>kvasir inspect ", EscapeXml(kVersion),
      "</footer>\n</main></body></html>\n");
}

}  // namespace kvasir::cli
