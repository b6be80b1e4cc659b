#include "compress/tool/auto_method.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/cli/flags.h"
#include "base/cli/progress.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "compress/apply/plan_probe.h"
#include "compress/calibrate/calibration_cost.h"
#include "compress/tensors/attention_loader.h"
#include "compress/tool/commands.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using compress::AutoPrediction;
using compress::CurvePoint;
using compress::DomainLoss;

// Returns a bar of stars whose length shows a share from 0 to 1.
std::string Bar(double share) {
  constexpr double kStars = 40;
  return std::string(static_cast<size_t>(std::lround(kStars * share)), '*');
}

std::string HistogramText(const AutoPrediction& prediction) {
  double all = 0;
  for (const double channels : prediction.channels_by_bits) all += channels;
  std::string text;
  for (size_t bits = 0; bits < prediction.channels_by_bits.size(); ++bits) {
    const double share = prediction.channels_by_bits[bits] / all;
    if (bits == 7) continue;  // no code has 7 bits
    absl::StrAppendFormat(&text, "  %d bits  %5.1f %%  %s\n", bits,
                          100.0 * share, Bar(share));
  }
  return text;
}

// Returns the index of the curve's point that is nearest to the plan in bytes.
size_t ChosenPoint(const AutoPrediction& prediction) {
  const auto distance = [&](const CurvePoint& point) {
    return std::abs(point.bytes - prediction.bytes);
  };
  const auto& curve = prediction.curve;
  return static_cast<size_t>(
      std::min_element(curve.begin(), curve.end(),
                       [&](const CurvePoint& a, const CurvePoint& b) {
                         return distance(a) < distance(b);
                       }) -
      curve.begin());
}

std::string CurveText(const AutoPrediction& prediction) {
  std::string text = "\n   bytes/token   predicted KL\n";
  const size_t chosen = ChosenPoint(prediction);
  for (size_t i = 0; i < prediction.curve.size(); ++i) {
    const CurvePoint& point = prediction.curve[i];
    absl::StrAppendFormat(&text, "%s %11.1f   %12.5f\n",
                          i == chosen ? " >" : "  ", point.bytes, point.kl);
  }
  return text;
}

std::string DomainsText(const AutoPrediction& prediction) {
  std::string text;
  for (const DomainLoss& domain : prediction.domains) {
    absl::StrAppendFormat(
        &text, "  %-16s %.5f, left out of the calibration %.5f (x %.2f)\n",
        base::Printable(domain.name), domain.predicted, domain.left_out,
        domain.ratio());
  }
  for (const DomainLoss& domain : prediction.domains) {
    if (domain.ratio() <= compress::kDomainWarning) continue;
    absl::StrAppendFormat(
        &text,
        "warning: %s is unlike the rest of the text: if it were left out "
        "of the calibration, its loss would be %.2f times as large. "
        "Calibrate on texts like those that the model will read.\n",
        base::Printable(domain.name), domain.ratio());
  }
  return text;
}

// The default number of probes if --max-kl is given, because the prediction
// then decides the plan. If a number of bytes is given instead, the prediction
// does not affect the plan, so there are no probes by default.
constexpr int kDefaultProbes = 5;

int ProbesOf(const AutoFlags& flags, bool by_bytes,
             const CalibrationInputs& inputs) {
  if (flags.probes) return *flags.probes;
  const bool can = inputs.sample && inputs.sample->held_out_sequences > 1;
  return !by_bytes && !flags.kappa && can ? kDefaultProbes : 0;
}

// Measures plans for the planner and shows its progress. The PlanProbe is made
// at the first measurement.
class Prober {
 public:
  Prober(const CalibrationFlags& machine, const model::Checkpoint& checkpoint,
         const CalibrationInputs& inputs, int plans)
      : machine_(machine),
        checkpoint_(checkpoint),
        inputs_(inputs),
        plans_(plans) {}

  absl::StatusOr<double> Measure(const kvasir::v1::KvPlan& plan) {
    if (probe_ == nullptr) KVASIR_RETURN_IF_ERROR(Open());
    return probe_->Measure(plan);
  }

 private:
  absl::Status Open() {
    if (!machine_.quiet) {
      absl::FPrintF(
          stderr,
          "probes: %d plans on held-out text; up to %s of memory in addition "
          "to the calibration; about %s\n",
          plans_,
          HumanBytes(
              static_cast<double>(compress::PlanProbe::BytesOf(checkpoint_))),
          HumanTime(compress::PlanProbe::TimeOf(
              checkpoint_.spec(), *inputs_.sample, plans_,
              compress::MeasureOperationsPerSecond(machine_.threads))));
    }
    const int64_t teacher = compress::PlanProbe::WindowsOf(*inputs_.sample);
    line_.emplace(
        "probes",
        plans_ * (checkpoint_.spec().num_layers() + teacher) + teacher, "steps",
        !machine_.quiet);
    KVASIR_ASSIGN_OR_RETURN(
        probe_, compress::PlanProbe::Create(
                    checkpoint_, *inputs_.calibration(), *inputs_.sample,
                    {.threads = machine_.threads, .progress = [this] {
                       line_->Update(++done_);
                       return !StopAsked();
                     }}));
    return absl::OkStatus();
  }

  const CalibrationFlags& machine_;
  const model::Checkpoint& checkpoint_;
  const CalibrationInputs& inputs_;
  const int plans_;
  int64_t done_ = 0;
  std::optional<Progress> line_;
  std::unique_ptr<compress::PlanProbe> probe_;
};

std::string KappaText(const compress::FittedKappa& kappa) {
  std::string text =
      absl::StrFormat("measured / predicted  %.2f (%.2f to %.2f)", kappa.median,
                      kappa.low, kappa.high);
  if (kappa.trials.empty()) return "";
  if (kappa.spearman) {
    absl::StrAppendFormat(&text, ", rank correlation %.2f", *kappa.spearman);
  }
  absl::StrAppendFormat(&text, ", of %d plans\n", kappa.trials.size());
  for (const compress::PlanTrial& trial : kappa.trials) {
    absl::StrAppendFormat(&text, "  %9.1f bytes/token: %.5f, measured %.5f\n",
                          trial.bytes, trial.predicted, trial.measured);
  }
  return text;
}

nlohmann::ordered_json KappaJson(const compress::FittedKappa& kappa) {
  nlohmann::ordered_json trials = nlohmann::ordered_json::array();
  for (const compress::PlanTrial& trial : kappa.trials) {
    trials.push_back({{"bytes_per_token", trial.bytes},
                      {"predicted", trial.predicted},
                      {"measured", trial.measured}});
  }
  nlohmann::ordered_json json = {
      {"median", kappa.median}, {"low", kappa.low}, {"high", kappa.high}};
  if (kappa.spearman) json["spearman"] = *kappa.spearman;
  json["probes"] = trials;
  return json;
}

}  // namespace

void AddAutoFlags(CLI::App* command, AutoFlags& flags) {
  auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group("Method auto");
  };
  add("--max-kl", flags.max_kl,
      "Largest predicted divergence in nats per token; without "
      "--kv-bytes-per-token, the plan with the fewest bytes that meets it")
      ->check(Above(0));
  add("--speed", flags.speed,
      "cpu or gpu: attention reads keys without rebuilding them; "
      "storage: fewest bytes")
      ->check(CLI::IsMember({"cpu", "gpu", "storage"}));
  add("--target-length", flags.target_length,
      "Sequence length by which the bytes of exact tokens are divided "
      "(0: 8192, or the model's context if that is less)")
      ->check(AtLeast(0));
  add("--windows", flags.windows,
      "Lengths of the exact window from which the planner chooses "
      "(default: 0,8,16,32,64,128,256)")
      ->delimiter(',')
      ->check(AtLeast(0));
  add("--kappa", flags.kappa,
      "Measured divergence divided by predicted divergence, if known "
      "(default: the factor that probes find, or 1)")
      ->check(Above(0));
  add("--probes", flags.probes,
      "Number of plans, with 0.6 to 1.4 times the bytes, that are "
      "measured on held-out text to correct the predictions; each takes "
      "seconds to minutes. With --kv-bytes-per-token the plan does not "
      "change (default: 5 with only --max-kl, otherwise 0)")
      ->check(Between(0, compress::kMostProbes));
}

void CheckAutoFlags(const AutoFlags& flags) {
  if (flags.kappa && flags.probes.value_or(0) > 0) {
    throw CLI::ValidationError(
        "--kappa replaces what --probes measure: give only one of them");
  }
}

absl::StatusOr<compress::AutoPlan> MakeAutoPlan(
    const AutoFlags& flags, std::optional<uint32_t> exact_sinks,
    std::optional<double> kv_bytes_per_token, int64_t tp,
    const CalibrationFlags& machine, const model::Checkpoint& checkpoint,
    const CalibrationInputs& inputs) {
  compress::PlanRequest request;
  request.spec = checkpoint.spec();
  request.calibration = inputs.calibration();
  request.weights = [&checkpoint](int64_t layer) {
    return compress::LoadAttention(checkpoint, layer);
  };
  request.tp = tp;
  compress::AutoOptions options;
  options.kv_bytes_per_token = kv_bytes_per_token;
  options.max_kl = flags.max_kl;
  KVASIR_ASSIGN_OR_RETURN(options.speed, compress::ParsePlanSpeed(flags.speed));
  options.target_length = flags.target_length;
  if (!flags.windows.empty()) options.windows = flags.windows;
  options.exact_sinks = exact_sinks.value_or(options.exact_sinks);
  options.kappa = flags.kappa.value_or(options.kappa);
  options.threads = machine.threads;
  std::optional<Progress> line;
  std::optional<Prober> prober;
  options.progress = [&](int64_t done, int64_t total) {
    prober.reset();
    if (!line) line.emplace("plan", total, "layer passes", !machine.quiet);
    line->Update(done);
    return !StopAsked();
  };
  options.probes = ProbesOf(flags, kv_bytes_per_token.has_value(), inputs);
  options.measure = [&](const kvasir::v1::KvPlan& plan) {
    if (!prober) {
      line.reset();
      prober.emplace(machine, checkpoint, inputs, options.probes);
    }
    return prober->Measure(plan);
  };
  KVASIR_ASSIGN_OR_RETURN(compress::AutoPlan made,
                          compress::PlanAuto(request, options));
  made.plan.set_base_model(checkpoint.name());
  return made;
}

std::string PredictionText(const AutoPrediction& prediction) {
  std::string text = absl::StrFormat(
      "predicted KL          %.5f nats per token%s (%.5f to %.5f over "
      "domains)\n"
      "%s"
      "bytes per token       %.1f: %.1f for each token, and %.0f per sequence "
      "divided by %d tokens\n"
      "exact tokens          window %d\n"
      "held-out rows         %.2f times the loss of fitted ones, %.2g %% of "
      "codes clamped\n",
      prediction.kl,
      prediction.kappa.trials.empty()
          ? ""
          : absl::StrFormat(" (%.5f to %.5f)", prediction.kl_low(),
                            prediction.kl_high()),
      prediction.low, prediction.high, KappaText(prediction.kappa),
      prediction.bytes, prediction.marginal_bytes, prediction.fixed_bytes,
      prediction.target_length, prediction.exact_window,
      prediction.held_out_loss_ratio, 100.0 * prediction.clamp_rate);
  if (prediction.dense_slot_ns > 0) {
    absl::StrAppendFormat(
        &text,
        "time of a slot        %.2f of the dense cache's, by a model%s\n",
        prediction.slot_ns / prediction.dense_slot_ns,
        prediction.slot_ns > prediction.dense_slot_ns
            ? ": no plan of so few bytes is as fast"
            : "");
  }
  absl::StrAppend(&text, "channels by bits\n", HistogramText(prediction),
                  "predicted KL by domain\n", DomainsText(prediction),
                  CurveText(prediction),
                  "\nlayer  bytes/token  predicted KL  spaces\n");
  for (size_t l = 0; l < prediction.layers.size(); ++l) {
    const compress::LayerChoice& layer = prediction.layers[l];
    absl::StrAppendFormat(&text, "%5d  %11.1f  %12.6f  %s\n", l, layer.bytes,
                          layer.loss, layer.spaces);
  }
  return text;
}

nlohmann::ordered_json PredictionJson(const AutoPrediction& prediction) {
  nlohmann::ordered_json curve = nlohmann::ordered_json::array();
  for (const CurvePoint& point : prediction.curve) {
    curve.push_back({{"bytes_per_token", point.bytes}, {"kl", point.kl}});
  }
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const compress::LayerChoice& layer : prediction.layers) {
    layers.push_back({{"spaces", layer.spaces},
                      {"bytes_per_token", layer.bytes},
                      {"kl", layer.loss}});
  }
  nlohmann::ordered_json domains = nlohmann::ordered_json::array();
  for (const DomainLoss& domain : prediction.domains) {
    domains.push_back({{"name", domain.name},
                       {"kl", domain.predicted},
                       {"kl_left_out", domain.left_out}});
  }
  return {{"kl", prediction.kl},
          {"kl_low", prediction.low},
          {"kl_high", prediction.high},
          {"kappa", KappaJson(prediction.kappa)},
          {"bytes_per_token", prediction.bytes},
          {"marginal_bytes_per_token", prediction.marginal_bytes},
          {"fixed_bytes_per_sequence", prediction.fixed_bytes},
          {"target_length", prediction.target_length},
          {"exact_window", prediction.exact_window},
          {"channels_by_bits", prediction.channels_by_bits},
          {"held_out_loss_ratio", prediction.held_out_loss_ratio},
          {"clamp_rate", prediction.clamp_rate},
          {"slot_ns", prediction.slot_ns},
          {"dense_slot_ns", prediction.dense_slot_ns},
          {"domains", domains},
          {"layers", layers},
          {"curve", curve}};
}

}  // namespace kvasir::cli
