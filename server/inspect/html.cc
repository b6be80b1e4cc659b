#include "server/inspect/html.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/cli/version.h"
#include "nlohmann/json.hpp"
#include "server/inspect/page.h"

namespace kvasir::cli {
namespace {

using nlohmann::ordered_json;

ordered_json CurveJson(const std::vector<ReportLength>& curve) {
  ordered_json json = ordered_json::array();
  for (const ReportLength& at : curve) {
    json.push_back({{"tokens", at.tokens},
                    {"kv_bytes", at.cache.total()},
                    {"kv_bytes_without_eviction", at.not_evicted_bytes},
                    {"dense_kv_bytes", at.dense_bytes}});
  }
  return json;
}

ordered_json EvaluationJson(const Evaluation& evaluation) {
  const EvaluationTeacher& teacher = evaluation.teacher;
  ordered_json rows = ordered_json::array();
  for (const EvaluationRow& row : evaluation.rows) {
    rows.push_back(
        {{"model", row.model},
         {"method", row.method},
         {"keep", row.keep},
         {"kv_bytes_per_token", row.kv_bytes_per_token},
         {"kv_payload_bytes_per_token", row.kv_payload_bytes_per_token},
         {"kv_bytes_per_seen_token", row.kv_bytes_per_seen_token},
         {"eviction", row.eviction},
         {"added_nats_per_token", row.added_nats_per_token},
         {"added_ci95", {row.added_low, row.added_high}},
         {"perplexity", row.perplexity},
         {"top1_agreement", row.top1_agreement},
         {"kl_nats", row.kl_nats}});
  }
  return {{"teacher",
           {{"model", teacher.model},
            {"nats_per_token", teacher.nats_per_token},
            {"nats_per_byte", teacher.nats_per_byte},
            {"kv_bytes_per_token", teacher.kv_bytes_per_token}}},
          {"text", evaluation.text},
          {"window_tokens", evaluation.window_tokens},
          {"windows", evaluation.windows},
          {"rows", std::move(rows)}};
}

std::string EscapeText(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

}  // namespace

std::string ReportToHtml(const InspectReport& report,
                         const std::vector<Evaluation>& evaluations) {
  ordered_json data = {{"version", kVersion},
                       {"report", ReportToJson(report)},
                       {"curve", CurveJson(report.curve)},
                       {"evaluations", ordered_json::array()}};
  for (const Evaluation& evaluation : evaluations) {
    data["evaluations"].push_back(EvaluationJson(evaluation));
  }
  // Escape '<', so that no name can end the script element or begin a comment.
  const std::string json = absl::StrReplaceAll(
      data.dump(-1, ' ', false, ordered_json::error_handler_t::replace),
      {{"<", "\\u003c"}});
  // Replace all placeholders in one pass, so that placeholders in inserted
  // texts stay as they are.
  return absl::StrReplaceAll(
      kInspectPage, {{"{{title}}", EscapeText(absl::StrCat(report.name, ": ",
                                                           report.method))},
                     {"{{text}}", EscapeText(ReportToText(report))},
                     {"{{data}}", json}});
}

}  // namespace kvasir::cli
