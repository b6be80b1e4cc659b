#include "compress/planner/plan_judge.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "compress/calibrate/shrunk_information.h"
#include "compress/runtime/for_each_index.h"

namespace kvasir::compress {
namespace {

// Returns the Fisher information [2n, 2n] of all these domains, with shrinkage.
// Keys and values form separate blocks on the diagonal.
at::Tensor InformationOf(const LayerCalibration& calibration,
                         const std::set<size_t>& domains) {
  at::Tensor key;
  at::Tensor value;
  double tokens = 0;
  for (const size_t d : domains) {
    const DomainInformation& domain = calibration.domains[d];
    const auto weight = static_cast<double>(domain.tokens);
    const at::Tensor key_sum = domain.key_information.to(at::kDouble) * weight;
    const at::Tensor value_sum =
        domain.value_information.to(at::kDouble) * weight;
    key = key.defined() ? key + key_sum : key_sum;
    value = value.defined() ? value + value_sum : value_sum;
    tokens += weight;
  }
  return at::block_diag({Shrunk(key / tokens), Shrunk(value / tokens)});
}

LayerMoments MomentsWithout(const LayerCalibration& calibration, size_t domain,
                            const SampleRows& others) {
  std::set<size_t> rest;
  for (size_t d = 0; d < calibration.domains.size(); ++d) {
    if (d != domain) rest.insert(d);
  }
  LayerMoments moments;
  moments.mean = others.rows.to(at::kDouble).mean(0);
  const at::Tensor centred = others.rows - moments.mean.to(at::kFloat);
  moments.covariance = centred.t().mm(centred).to(at::kDouble) /
                       static_cast<double>(centred.size(0));
  moments.information = InformationOf(calibration, rest);
  return moments;
}

// The loss of one part's codes, before the factors kappa and WindowFactor.
struct PartLoss {
  double fitted = 0;
  CodeLoss held_out;
  // The loss on each domain's rows: with the plan's codes (by_domain), and with
  // codes found from the other domains only (left_out).
  std::vector<double> by_domain;
  std::vector<double> left_out;
};

void JudgeDomains(const JudgeRequest& request, const TakenPart& taken,
                  const std::vector<LatentCodes>& coded, PartLoss& loss) {
  const model::DecoderSpec& spec = *request.spec;
  const LayerCalibration& calibration =
      request.calibration->layers[static_cast<size_t>(taken.candidate->layer)];
  if (loss.by_domain.size() < 2) return;
  const at::Tensor after_sinks =
      calibration.sample_positions >= request.exact_sinks;
  for (size_t d = 0; d < loss.by_domain.size(); ++d) {
    const at::Tensor inside =
        calibration.sample_domains == static_cast<int64_t>(d);
    const SampleRows own =
        RowsWhere(calibration, after_sinks.logical_and(inside), request.span);
    const SampleRows others =
        RowsWhere(calibration,
                  after_sinks.logical_and(inside.logical_not())
                      .logical_and(calibration.sample_held_out.logical_not()),
                  request.span);
    if (own.rows.size(0) < 2 || others.rows.size(0) < 2) continue;
    const LayerMoments without = MomentsWithout(calibration, d, others);
    const at::Tensor information = InformationOf(calibration, {d});
    loss.by_domain[d] = MeasureLoss(coded, information, spec, own).loss;
    const std::vector<LatentCodes> left_out =
        CodeLatents(TransformsOf(taken.candidate->option, without, spec), spec,
                    others, taken.widths);
    loss.left_out[d] = MeasureLoss(left_out, information, spec, own).loss;
  }
}

PartLoss JudgePart(const JudgeRequest& request, const TakenPart& taken,
                   size_t domains) {
  const at::NoGradGuard no_grad;
  const model::DecoderSpec& spec = *request.spec;
  const SpaceOption& option = taken.candidate->option;
  PartLoss loss;
  // Codes of rotated heads do not depend on a text, so they have the same loss
  // on any domain. For other codes NaN stands for a loss that is not measured.
  const double own = option.rotated()
                         ? OwnLoss(taken)
                         : std::numeric_limits<double>::quiet_NaN();
  loss.by_domain.assign(domains, own);
  loss.left_out.assign(domains, own);
  if (option.rotated()) return loss;
  const PlannedLayer& data =
      (*request.layers)[static_cast<size_t>(taken.candidate->layer)];
  const std::vector<LatentCodes> coded =
      CodeLatents(TransformsOf(option, data.moments, spec), spec, data.fitted,
                  taken.widths);
  loss.fitted =
      MeasureLoss(coded, data.moments.information, spec, data.fitted).loss;
  if (data.held_out.rows.size(0) > 0) {
    loss.held_out =
        MeasureLoss(coded, data.moments.information, spec, data.held_out);
  }
  JudgeDomains(request, taken, coded, loss);
  return loss;
}

double ScaleOf(const JudgeRequest& request, const TakenPart& taken) {
  return request.kappa *
         WindowFactor(taken.candidate->option, request.exact_window);
}

// Adds to the prediction what is known without another measurement: the part's
// space, bytes, predicted loss and bits.
void AddChoice(const JudgeRequest& request, const TakenPart& taken,
               AutoPrediction& prediction) {
  const PlanCandidate& candidate = *taken.candidate;
  LayerChoice& choice = prediction.layers[static_cast<size_t>(candidate.layer)];
  absl::StrAppend(&choice.spaces, choice.spaces.empty() ? "" : " + ",
                  candidate.option.Name(request.spec->num_kv_heads));
  const PartChannels& channels = candidate.channels;
  choice.bytes += static_cast<double>(GrainsOf(channels, taken.widths) *
                                      channels.grain_bytes);
  choice.loss += OwnLoss(taken) * ScaleOf(request, taken);
  for (size_t g = 0; g < taken.widths.size(); ++g) {
    prediction.channels_by_bits[static_cast<size_t>(taken.widths[g])] +=
        static_cast<double>(channels.groups[g].channels * channels.latents);
  }
}

}  // namespace

SampleRows RowsWhere(const LayerCalibration& calibration,
                     const at::Tensor& wanted, int64_t span) {
  SampleRows sample;
  sample.rows =
      calibration.sample_rows.index_select(0, wanted.nonzero().flatten());
  sample.positions = SpreadPositions(sample.rows.size(0), span);
  return sample;
}

void JudgePlan(const JudgeRequest& request, const std::vector<TakenPart>& parts,
               AutoPrediction& prediction) {
  const std::vector<DomainInformation>& domains =
      request.calibration->layers[0].domains;
  std::vector<PartLoss> losses(parts.size());
  std::mutex mutex;
  ForEachIndex(
      static_cast<int64_t>(parts.size()), request.threads, [&](int64_t i) {
        const auto index = static_cast<size_t>(i);
        losses[index] = JudgePart(request, parts[index], domains.size());
        const std::lock_guard lock(mutex);
        request.on_part();
      });
  prediction.channels_by_bits.assign(9, 0.0);
  prediction.layers.resize(request.layers->size());
  for (const DomainInformation& domain : domains) {
    prediction.domains.push_back({.name = domain.name});
  }
  double fitted = 0;
  double held_out = 0;
  double clamped = 0;
  double codes = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    AddChoice(request, parts[p], prediction);
    const PartLoss& loss = losses[p];
    const double scale = ScaleOf(request, parts[p]);
    fitted += loss.fitted;
    held_out += loss.held_out.loss;
    clamped += loss.held_out.clamped;
    codes += loss.held_out.codes;
    for (size_t d = 0; d < domains.size(); ++d) {
      prediction.domains[d].predicted += loss.by_domain[d] * scale;
      prediction.domains[d].left_out += loss.left_out[d] * scale;
    }
  }
  if (codes > 0) {
    prediction.held_out_loss_ratio = held_out / fitted;
    prediction.clamp_rate = clamped / codes;
  }
  // The loss of a domain is not predicted if the domain has too few rows or is
  // the only one.
  std::erase_if(prediction.domains, [](const DomainLoss& domain) {
    return !(domain.predicted > 0) || !(domain.left_out > 0);
  });
  prediction.low = prediction.kl;
  prediction.high = prediction.kl;
  for (const DomainLoss& domain : prediction.domains) {
    prediction.low =
        std::min({prediction.low, domain.predicted, domain.left_out});
    prediction.high =
        std::max({prediction.high, domain.predicted, domain.left_out});
  }
}

}  // namespace kvasir::compress
