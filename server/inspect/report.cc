#include "server/inspect/report.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/cli/units.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "model/checkpoint/plan_tensors.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"
#include "server/inspect/rank_weights.h"
#include "worker/program/prompt_lift.h"
#include "worker/program/served_plan.h"

namespace kvasir::cli {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kCurveSteps = 96;

WeightSizes DenseWeights(const model::DecoderSpec& spec, int64_t number_bytes) {
  WeightSizes sizes;
  for (const model::RequiredTensor& tensor : model::RequiredTensors(spec)) {
    int64_t bytes = number_bytes;
    for (const int64_t length : tensor.shape) bytes *= length;
    sizes.Add(tensor.name, bytes);
  }
  return sizes;
}

int64_t AllTokens(int64_t tokens, int64_t bytes_per_token) {
  int64_t bytes = 0;
  return __builtin_mul_overflow(tokens, bytes_per_token, &bytes)
             ? std::numeric_limits<int64_t>::max()
             : bytes;
}

// The plan's layout and, if the plan evicts, the layout of the same plan
// without eviction.
struct Layouts {
  cache::PageLayout own;
  std::optional<cache::PageLayout> keeps_all;
};

absl::StatusOr<Layouts> LayOut(const plan::ResolvedPlan& plan,
                               const cache::PageFormat& format) {
  KVASIR_ASSIGN_OR_RETURN(cache::PageLayout own,
                          cache::PageLayout::Create(plan, format));
  Layouts layouts{.own = std::move(own)};
  if (std::none_of(plan.page_groups.begin(), plan.page_groups.end(),
                   [](const auto& group) { return group.eviction.evicts(); })) {
    return layouts;
  }
  kvasir::v1::KvPlan source = plan.source;
  for (auto& layer : *source.mutable_layers()) layer.clear_eviction();
  KVASIR_ASSIGN_OR_RETURN(
      layouts.keeps_all,
      cache::PageLayout::Create(source, plan.shape, format, plan.shard));
  return layouts;
}

ReportLength AtLength(const Layouts& layouts, const DenseBytes& dense,
                      const ReportOptions& options, int64_t tokens) {
  ReportLength at;
  at.tokens = tokens;
  at.cache = BytesOfSequence(layouts.own, tokens, options.max_batched_tokens);
  if (layouts.keeps_all.has_value()) {
    at.not_evicted_bytes =
        layouts.keeps_all->BytesAtLength(tokens, options.max_batched_tokens);
  }
  at.dense_bytes = AllTokens(tokens, dense.own);
  at.dense_bf16_bytes = AllTokens(tokens, dense.bf16);
  return at;
}

// Returns the default lengths: a 64th, a 16th and a 4th of the model's length,
// and the whole length.
std::vector<int64_t> DefaultLengths(int64_t most) {
  std::vector<int64_t> lengths;
  for (const int64_t part : {64, 16, 4, 1}) {
    if (most / part > 0) lengths.push_back(most / part);
  }
  return lengths;
}

// Computes the bytes that a sequence takes at equally spaced lengths from 0 to
// `most` tokens.
std::vector<ReportLength> Curve(const Layouts& layouts, const DenseBytes& dense,
                                const ReportOptions& options, int64_t most) {
  std::vector<ReportLength> curve;
  int64_t last = -1;
  for (int64_t step = 0; step <= kCurveSteps; ++step) {
    const int64_t tokens =
        most / kCurveSteps * step + most % kCurveSteps * step / kCurveSteps;
    if (tokens > last)
      curve.push_back(AtLength(layouts, dense, options, tokens));
    last = tokens;
  }
  return curve;
}

ReportEviction EvictionOf(const plan::ResolvedPlan& plan, int64_t index,
                          const cache::PageLayout& layout) {
  const plan::ResolvedLayer& layer = plan.layer(index);
  const plan::ResolvedEviction& rule = *layer.eviction;
  return {
      .counts =
          plan.page_groups[static_cast<size_t>(layer.page_group)].eviction,
      .method = !rule.scored       ? "streaming"
                : rule.lambda == 1 ? "h2o"
                                   : "q-hitter",
      .sinks = rule.sinks,
      .recent = rule.recent,
      .lambda = rule.lambda,
      .decay = rule.decay,
      .units = static_cast<int64_t>(rule.units.size()),
      .metadata_bytes_per_slot =
          static_cast<double>(layout.layer(index).slot_metadata.size_bytes()) /
          static_cast<double>(layout.page_tokens())};
}

bool EvictAlike(const ReportEviction& a, const ReportEviction& b) {
  const auto rule = [](const ReportEviction& of) {
    return std::tie(of.counts, of.method, of.sinks, of.recent, of.lambda,
                    of.decay, of.units, of.metadata_bytes_per_slot);
  };
  return rule(a) == rule(b);
}

std::vector<ReportEviction> EvictionsOf(const plan::ResolvedPlan& plan,
                                        const cache::PageLayout& layout) {
  std::vector<ReportEviction> evictions;
  for (int64_t index = 0; index < plan.num_layers(); ++index) {
    if (!plan.layer(index).eviction.has_value()) continue;
    ReportEviction own = EvictionOf(plan, index, layout);
    auto alike = std::find_if(
        evictions.begin(), evictions.end(),
        [&own](const ReportEviction& one) { return EvictAlike(one, own); });
    if (alike == evictions.end()) {
      alike = evictions.insert(alike, std::move(own));
    }
    alike->layers.push_back(index);
  }
  return evictions;
}

ordered_json ToJson(const ReportEviction& eviction) {
  return {{"layers", eviction.layers},
          {"method", eviction.method},
          {"budget_slots", eviction.counts.budget_tokens},
          {"budget_share", eviction.counts.budget_ratio},
          {"sinks", eviction.sinks},
          {"recent", eviction.recent},
          {"every_tokens", eviction.counts.every_tokens},
          {"lambda", eviction.lambda},
          {"decay", eviction.decay},
          {"units", eviction.units},
          {"metadata_bytes_per_slot", eviction.metadata_bytes_per_slot}};
}

template <typename T>
ordered_json ToJson(const CacheBytes<T>& bytes) {
  return {
      {"key_codes", bytes.key_codes},      {"value_codes", bytes.value_codes},
      {"parameters", bytes.parameters},    {"annotations", bytes.annotations},
      {"padding", bytes.padding},          {"unfilled", bytes.unfilled},
      {"per_sequence", bytes.per_sequence}};
}

ordered_json ToJson(const ReportSide& side) {
  const LayerSideSummary& summary = side.summary;
  ordered_json groups = ordered_json::array();
  for (const GroupSummary& group : summary.group_list) {
    groups.push_back({{"part", group.part},
                      {"heads", group.heads},
                      {"rank", group.rank},
                      {"stored", group.stored}});
  }
  return {{"layer", summary.layer},
          {"side", summary.side},
          {"method", summary.method},
          {"rank", summary.rank},
          {"groups", groups},
          {"group_ranks", summary.groups},
          {"bits", summary.bits},
          {"lift", summary.lift},
          {"stored", summary.stored},
          {"range", summary.range},
          {"transform", summary.transform},
          {"bytes_per_token", summary.bytes_per_token},
          {"parameter_bytes_per_token", summary.param_bytes_per_token},
          {"attention_flops", side.flops.attention},
          {"reconstruction_flops", side.flops.reconstruction},
          {"lifted_from_tokens", side.lifted_from_tokens},
          {"sliding_window", summary.sliding_window},
          {"exact_sinks", summary.exact_sinks},
          {"exact_window", summary.exact_window}};
}

// Sets ReportSide::lifted_from_tokens and InspectReport::invariance. `plan` is
// for the whole model on one rank.
void ReportPromptLifts(const worker::ServedPlan& plan, bool rows_are_invariant,
                       InspectReport* report) {
  // [0] keys, [1] values; indexed by layer
  std::vector<int64_t> lifted_from[2];
  bool lifts = false;
  for (int64_t layer = 0; layer < plan.resolved->num_layers(); ++layer) {
    const worker::AttentionProgram& program = plan.program(layer);
    lifts = lifts || worker::LiftsPrompts(program);
    int64_t key = 0;
    for (const worker::KeyProgram& part : program.key) {
      if (!part.prompt_lift.has_value()) continue;
      const int64_t own = part.prompt_lift->from_rows;
      key = key == 0 ? own : std::min(key, own);
    }
    lifted_from[0].push_back(key);
    lifted_from[1].push_back(program.value.prompt_lift.has_value()
                                 ? program.value.prompt_lift->from_rows
                                 : 0);
  }
  for (ReportSide& side : report->sides) {
    const bool key = side.summary.side == plan::SideName(plan::Side::kKey);
    side.lifted_from_tokens =
        lifted_from[key ? 0 : 1][static_cast<size_t>(side.summary.layer)];
  }
  report->invariance = worker::InvarianceName(lifts, rows_are_invariant);
}

// Reports the share of each tensor-parallel rank. `served` is the plan of a
// server with one rank.
absl::StatusOr<RankSummary> Ranks(
    const ModelSource& source, const ReportOptions& options,
    const absl::StatusOr<std::shared_ptr<const worker::ServedPlan>>& served) {
  KVASIR_ASSIGN_OR_RETURN(
      const RankPlans plans,
      ResolveForRanks(source.plan->source, source.spec, options.tp));
  KVASIR_ASSIGN_OR_RETURN(
      RankSummary summary,
      SummarizeRanks(plans, source.spec,
                     {.page_tokens = options.page_tokens,
                      .granule_bytes = options.granule_bytes}));
  if (!served.ok()) return summary;
  const worker::ServeOptions serve = {.lift_prompts = !options.deterministic};
  KVASIR_ASSIGN_OR_RETURN(
      summary.whole_weight_bytes,
      CountResidentBytes(source, *served, options.matrices));
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    KVASIR_ASSIGN_OR_RETURN(auto of_rank,
                            worker::ServePlan(plans[rank], serve));
    KVASIR_ASSIGN_OR_RETURN(
        summary.ranks[rank].weight_bytes,
        CountResidentBytes(source, std::move(of_rank), options.matrices));
  }
  return summary;
}

std::string Human(int64_t bytes) {
  return HumanBytes(static_cast<double>(bytes));
}

void AppendHead(const InspectReport& report, std::string* out) {
  absl::StrAppendFormat(
      out, "%s (%s): %d layer%s, %d query and %d KV heads of %d\n", report.name,
      report.model_type, report.num_layers, report.num_layers == 1 ? "" : "s",
      report.num_heads, report.num_kv_heads, report.head_dim);
  if (report.weights.bytes > 0) {
    absl::StrAppendFormat(out, "weights               %s (attention %s)\n",
                          Human(report.weights.bytes),
                          Human(report.weights.attention_bytes));
  }
  absl::StrAppendFormat(out, "plan                  %s", report.method);
  if (!report.base_model.empty()) {
    absl::StrAppendFormat(out, ", made for %s", report.base_model);
  }
  if (!report.weights_fit) {
    out->append("; not applied yet: the folder has other weights");
  }
  out->push_back('\n');
  if (!report.not_served.empty()) {
    absl::StrAppendFormat(out, "not served            %s\n", report.not_served);
  } else {
    absl::StrAppendFormat(out, "invariance            %s\n", report.invariance);
  }
  const auto& provenance = report.provenance;
  for (const auto& [label, value] :
       {std::pair{"made by", provenance.tool_version()},
        std::pair{"options", provenance.options()},
        std::pair{"decomposition", provenance.decomposition()},
        std::pair{"calibration", provenance.calibration_id()}}) {
    if (!value.empty()) absl::StrAppendFormat(out, "  %-20s%s\n", label, value);
  }
}

void AppendPrediction(const InspectReport& report, std::string* out) {
  if (report.foreign_prediction) {
    out->append(
        "predicted divergence  not known: the prediction next to this plan is "
        "for another plan\n");
  }
  if (!report.prediction.has_value()) return;
  const Prediction& prediction = *report.prediction;
  absl::StrAppendFormat(
      out,
      "predicted divergence  %.5f nats a token (%.5f to %.5f over domains)",
      prediction.plan.kl, prediction.kl_low, prediction.kl_high);
  if (!prediction.probes.empty()) {
    absl::StrAppendFormat(out, ", with %d plans measured",
                          prediction.probes.size());
  }
  out->push_back('\n');
}

void AppendBytes(const InspectReport& report, std::string* out) {
  absl::StrAppendFormat(out, "KV bytes per token    %.1f (payload %.1f, %s)\n",
                        report.bytes_per_token, report.payload_bytes_per_token,
                        report.dense.text());
  absl::StrAppendFormat(out, "  keys %.1f, values %.1f, scales and minima %.1f",
                        report.token.key_codes, report.token.value_codes,
                        report.token.parameters);
  if (report.token.annotations > 0) {
    absl::StrAppendFormat(out, ", landmarks and slot metadata %.1f",
                          report.token.annotations);
  }
  absl::StrAppendFormat(out, ", padding %.1f\n", report.token.padding);
  absl::StrAppendFormat(out, "compression ratio     %s\n",
                        report.dense.RatioText(report.bytes_per_token));
  AppendPrediction(report, out);
  absl::StrAppendFormat(out, "fixed per sequence    %s\n",
                        Human(report.fixed_bytes_per_sequence));
  const worker::SideFlops flops = report.flops();
  absl::StrAppendFormat(
      out,
      "attention FLOPs       %d per query token and cached token (dense %d)\n"
      "reconstruction FLOPs  %d per cached token, each time it is read\n",
      flops.attention, 2 * report.num_layers * report.dense_side_flops,
      flops.reconstruction);
}

void AppendEvictions(const InspectReport& report, std::string* out) {
  for (const ReportEviction& eviction : report.evictions) {
    const plan::EvictionCounts& counts = eviction.counts;
    const std::string kept =
        counts.budget_tokens > 0
            ? absl::StrCat(counts.budget_tokens, " slots stay")
            : absl::StrFormat("%g %% of the prompt stays, %d slots at least",
                              100.0 * counts.budget_ratio, counts.least_tokens);
    absl::StrAppendFormat(
        out,
        "eviction              %s in %d layer%s: %s (%d sinks and %d recent "
        "among them); evictions every %d tokens\n"
        "  metadata            %d unit%s a layer, %.1f bytes per slot\n",
        eviction.method, eviction.layers.size(),
        eviction.layers.size() == 1 ? "" : "s", kept, eviction.sinks,
        eviction.recent, counts.every_tokens, eviction.units,
        eviction.units == 1 ? "" : "s", eviction.metadata_bytes_per_slot);
  }
}

// Returns how many first and how many latest tokens are also stored
// exactly: "4+32".
std::string ExactText(const LayerSideSummary& row) {
  return row.exact_sinks + row.exact_window == 0
             ? "-"
             : absl::StrCat(row.exact_sinks, "+", row.exact_window);
}

void AppendTable(const InspectReport& report, std::string* out) {
  size_t method = 6, groups = 6, bits = 4, lift = 4, range = 5, transform = 9;
  for (const ReportSide& side : report.sides) {
    method = std::max(method, side.summary.method.size());
    groups = std::max(groups, side.summary.groups.size());
    bits = std::max(bits, side.summary.bits.size());
    lift = std::max(lift, side.summary.lift.size());
    range = std::max(range, side.summary.range.size());
    transform = std::max(transform, side.summary.transform.size());
  }
  const auto width = [](size_t size) { return static_cast<int>(size); };
  absl::StrAppendFormat(
      out,
      "\nlayer side   %-*s  %5s  %-*s  %-*s  %-*s  %-*s  %-*s  %11s  %9s  %9s  "
      "%6s  %s\n",
      width(method), "method", "rank", width(groups), "groups", width(bits),
      "bits", width(lift), "lift", width(range), "range", width(transform),
      "transform", "bytes/token", "attention", "rebuild", "window", "exact");
  for (const ReportSide& side : report.sides) {
    const LayerSideSummary& row = side.summary;
    absl::StrAppendFormat(
        out,
        "%5d %-6s %-*s  %5d  %-*s  %-*s  %-*s  %-*s  %-*s  %11.1f  %9d  %9d  "
        "%6s  %s\n",
        row.layer, row.side, width(method), row.method, row.rank, width(groups),
        row.groups, width(bits), row.bits, width(lift), row.lift, width(range),
        row.range, width(transform), row.transform, row.bytes_per_token,
        side.flops.attention, side.flops.reconstruction,
        row.sliding_window == 0 ? "-" : absl::StrCat(row.sliding_window),
        ExactText(row));
  }
}

}  // namespace

worker::SideFlops InspectReport::flops() const {
  worker::SideFlops sum;
  for (const ReportSide& side : sides) {
    sum.attention += side.flops.attention;
    sum.reconstruction += side.flops.reconstruction;
  }
  return sum;
}

absl::StatusOr<InspectReport> MakeInspectReport(const ModelSource& source,
                                                const ReportOptions& options) {
  const model::DecoderSpec& spec = source.spec;
  InspectReport report;
  report.name = source.name;
  report.model_type = spec.model_type;
  report.num_layers = spec.num_layers();
  report.num_heads = spec.num_heads;
  report.num_kv_heads = spec.num_kv_heads;
  report.head_dim = spec.head_dim;
  report.max_positions = spec.max_position_embeddings;
  report.method = source.plan->source.method();
  report.base_model = source.plan->source.base_model();
  report.target = source.plan->source.target();
  report.provenance = source.plan->source.provenance();
  report.weights_fit = source.weights_fit;
  KVASIR_ASSIGN_OR_RETURN(
      const Layouts layouts,
      LayOut(*source.plan, {.page_tokens = options.page_tokens,
                            .granule_bytes = options.granule_bytes}));
  const cache::PageLayout& layout = layouts.own;
  const auto served =
      worker::ServePlan(source.plan, {.lift_prompts = !options.deterministic});
  if (!served.ok() && !absl::IsUnimplemented(served.status())) {
    return served.status();
  }
  report.not_served = std::string(served.status().message());

  report.page_tokens = layout.page_tokens();
  report.bytes_per_token = layout.marginal_bytes_per_token();
  report.payload_bytes_per_token = layout.marginal_payload_bytes_per_token();
  report.token = BytesOfToken(layout);
  report.fixed_bytes_per_sequence = layout.fixed_bytes_per_sequence();
  report.fixed_payload_bytes_per_sequence =
      layout.fixed_payload_bytes_per_sequence();
  report.dense = DenseBytesPerToken(layout, OwnCacheType(source));
  report.weights = WeightBytes(source);
  report.dense_weights =
      DenseWeights(spec, plan::DataTypeBytes(report.dense.type));

  for (LayerSideSummary& summary : SummarizePlan(*source.plan, layout)) {
    const bool key = summary.side == plan::SideName(plan::Side::kKey);
    const plan::Side side = key ? plan::Side::kKey : plan::Side::kValue;
    const worker::SideFlops flops =
        worker::FlopsPerSlot(*source.plan, summary.layer, side);
    report.sides.push_back({std::move(summary), flops});
  }
  if (served.ok())
    ReportPromptLifts(**served, options.rows_are_invariant, &report);
  report.dense_side_flops = worker::DenseFlopsPerSlot(source.plan->shape);
  const int64_t most =
      std::min(report.max_positions, cache::kMaxSequenceTokens);
  for (const int64_t length :
       options.lengths.empty() ? DefaultLengths(most) : options.lengths) {
    report.at_length.push_back(
        AtLength(layouts, report.dense, options, length));
  }
  report.curve = Curve(layouts, report.dense, options, most);
  report.evictions = EvictionsOf(*source.plan, layout);
  if (options.tp > 0) {
    KVASIR_ASSIGN_OR_RETURN(report.ranks, Ranks(source, options, served));
  }
  return report;
}

ordered_json ReportToJson(const InspectReport& report) {
  ordered_json layers = ordered_json::array();
  for (const ReportSide& side : report.sides) layers.push_back(ToJson(side));
  ordered_json evictions = ordered_json::array();
  for (const ReportEviction& eviction : report.evictions) {
    evictions.push_back(ToJson(eviction));
  }
  ordered_json at_length = ordered_json::array();
  for (const ReportLength& length : report.at_length) {
    const int64_t bytes = length.cache.total();
    at_length.push_back(
        {{"tokens", length.tokens},
         {"kv_bytes", bytes},
         {"weights_and_kv_bytes",
          report.weights.bytes > 0 ? ordered_json(report.weights.bytes + bytes)
                                   : ordered_json(nullptr)},
         {"kv_bytes_without_eviction",
          report.evictions.empty() ? ordered_json(nullptr)
                                   : ordered_json(length.not_evicted_bytes)},
         {"dense_kv_bytes", length.dense_bytes},
         {"dense_bf16_kv_bytes", length.dense_bf16_bytes},
         {"components", ToJson(length.cache)}});
  }
  const worker::SideFlops flops = report.flops();
  const auto& provenance = report.provenance;
  ordered_json report_json{
      {"model", report.name},
      {"model_type", report.model_type},
      {"method", report.method},
      {"base_model", report.base_model},
      {"provenance",
       {{"tool_version", provenance.tool_version()},
        {"options", provenance.options()},
        {"decomposition", provenance.decomposition()},
        {"calibration_id", provenance.calibration_id()},
        {"seed", provenance.seed()},
        {"target_kv_bytes_per_token", report.target.kv_bytes_per_token()},
        {"target_tp", report.target.tp()}}},
      {"num_layers", report.num_layers},
      {"num_heads", report.num_heads},
      {"num_kv_heads", report.num_kv_heads},
      {"head_dim", report.head_dim},
      {"max_positions", report.max_positions},
      {"weight_bytes", report.weights.bytes},
      {"attention_weight_bytes", report.weights.attention_bytes},
      {"dense_weight_bytes", report.dense_weights.bytes},
      {"dense_bf16_weight_bytes", report.dense_weights.bytes /
                                      plan::DataTypeBytes(report.dense.type) *
                                      plan::DataTypeBytes(kvasir::v1::BF16)},
      {"weights_fit", report.weights_fit},
      {"served", report.not_served.empty()},
      {"not_served", report.not_served},
      {"invariance", report.invariance},
      {"page_tokens", report.page_tokens},
      {"kv_bytes_per_token", report.bytes_per_token},
      {"kv_payload_bytes_per_token", report.payload_bytes_per_token},
      {"kv_bytes_per_token_components", ToJson(report.token)},
      {"kv_fixed_bytes_per_sequence", report.fixed_bytes_per_sequence},
      {"kv_fixed_payload_bytes_per_sequence",
       report.fixed_payload_bytes_per_sequence},
      {"dense_type", plan::DataTypeName(report.dense.type)},
      {"dense_bytes_per_token", report.dense.own},
      {"dense_bf16_bytes_per_token", report.dense.bf16},
      {"kv_compression_ratio",
       static_cast<double>(report.dense.own) / report.bytes_per_token},
      {"kv_compression_ratio_bf16",
       static_cast<double>(report.dense.bf16) / report.bytes_per_token},
      {"attention_flops", flops.attention},
      {"reconstruction_flops", flops.reconstruction},
      {"dense_attention_flops",
       2 * report.num_layers * report.dense_side_flops},
      {"prediction", report.prediction.has_value()
                         ? PredictionToJson(*report.prediction)
                         : ordered_json(nullptr)},
      {"evictions", evictions},
      {"tensor_parallel", report.ranks.has_value() ? RanksJson(*report.ranks)
                                                   : ordered_json(nullptr)},
      {"trace", report.trace.has_value() ? report.trace->ToJson()
                                         : ordered_json(nullptr)},
      {"at_length", at_length},
      {"layers", layers}};
  return report_json;
}

std::string ReportToText(const InspectReport& report) {
  std::string out;
  AppendHead(report, &out);
  AppendBytes(report, &out);
  AppendEvictions(report, &out);
  if (report.ranks.has_value()) out += RanksText(*report.ranks);
  AppendTable(report, &out);
  const bool evicts = !report.evictions.empty();
  const auto kept_all = [evicts](const std::string& text) {
    return evicts ? absl::StrFormat("%-15s  ", text) : std::string();
  };
  absl::StrAppendFormat(&out, "\n%20s  %-12s  %s%-12s  %s\n",
                        "tokens of a sequence", "KV bytes",
                        kept_all("nothing evicted"), report.dense.name(),
                        report.weights.bytes > 0 ? "weights + KV" : "");
  for (const ReportLength& length : report.at_length) {
    absl::StrAppendFormat(
        &out, "%20d  %-12s  %s%-12s  %s\n", length.tokens,
        Human(length.cache.total()), kept_all(Human(length.not_evicted_bytes)),
        Human(length.dense_bytes),
        report.weights.bytes > 0
            ? Human(report.weights.bytes + length.cache.total())
            : "");
  }
  if (report.trace.has_value()) out += report.trace->ToText();
  return out;
}

}  // namespace kvasir::cli
