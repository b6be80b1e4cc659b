#include "compress/planner/plan_judge.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "compress/calibrate/shrunk_information.h"

namespace kvasir::compress {
namespace {

// Of these domains together, shrunk; key and value apart, [2n, 2n].
at::Tensor InformationOf(const LayerCalibration& calibration,
                         const std::set<size_t>& domains) {
  at::Tensor key;
  at::Tensor value;
  double tokens = 0;
  for (const size_t d : domains) {
    const DomainInformation& domain = calibration.domains[d];
    const auto weight = static_cast<double>(domain.tokens);
    const at::Tensor of_key = domain.key_information.to(at::kDouble) * weight;
    const at::Tensor of_value =
        domain.value_information.to(at::kDouble) * weight;
    key = key.defined() ? key + of_key : of_key;
    value = value.defined() ? value + of_value : of_value;
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
  const at::Tensor rows = others.rows.to(at::kDouble);
  LayerMoments moments;
  moments.mean = rows.mean(0);
  const at::Tensor centred = rows - moments.mean;
  moments.covariance =
      centred.t().mm(centred) / static_cast<double>(rows.size(0));
  moments.information = InformationOf(calibration, rest);
  return moments;
}

// Adds a part's losses on each domain's rows: coded as planned, and as the
// other domains would have had it.
void JudgeDomains(const JudgeRequest& request, const TakenPart& taken,
                  const std::vector<LatentCodes>& coded,
                  AutoPrediction& prediction) {
  const model::DecoderSpec& spec = *request.spec;
  const double scale = request.scale;
  const LayerCalibration& calibration =
      request.calibration->layers[static_cast<size_t>(taken.candidate->layer)];
  if (prediction.domains.size() < 2) return;
  const at::Tensor behind_sinks =
      calibration.sample_positions >= request.exact_sinks;
  for (size_t d = 0; d < prediction.domains.size(); ++d) {
    const at::Tensor inside =
        calibration.sample_domains == static_cast<int64_t>(d);
    const SampleRows own =
        RowsWhere(calibration, behind_sinks.logical_and(inside), request.span);
    const SampleRows others =
        RowsWhere(calibration,
                  behind_sinks.logical_and(inside.logical_not())
                      .logical_and(calibration.sample_held_out.logical_not()),
                  request.span);
    if (own.rows.size(0) < 2 || others.rows.size(0) < 2) continue;
    const LayerMoments without = MomentsWithout(calibration, d, others);
    const at::Tensor information = InformationOf(calibration, {d});
    DomainLoss& loss = prediction.domains[d];
    loss.predicted += scale * MeasureLoss(coded, information, spec, own).loss;
    const std::vector<LatentCodes> left_out =
        CodeLatents(TransformsOf(taken.candidate->option, without, spec), spec,
                    others, taken.widths);
    loss.left_out += scale * MeasureLoss(left_out, information, spec, own).loss;
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
  const model::DecoderSpec& spec = *request.spec;
  const double scale = request.scale;
  prediction.channels_by_bits.assign(9, 0.0);
  double fitted = 0;
  double held_out = 0;
  double clamped = 0;
  double codes = 0;
  const std::vector<DomainInformation>& domains =
      request.calibration->layers[0].domains;
  for (const DomainInformation& domain : domains) {
    prediction.domains.push_back({.name = domain.name});
  }
  prediction.layers.resize(request.layers->size());
  for (const TakenPart& taken : parts) {
    const auto l = static_cast<size_t>(taken.candidate->layer);
    const PlannedLayer& data = (*request.layers)[l];
    const SpaceOption& option = taken.candidate->option;
    LayerChoice& choice = prediction.layers[l];
    absl::StrAppend(&choice.spaces, choice.spaces.empty() ? "" : " + ",
                    option.Name(spec.num_kv_heads));
    const PartChannels& channels = taken.candidate->channels;
    choice.bytes += static_cast<double>(GrainsOf(channels, taken.widths) *
                                        channels.grain_bytes);
    double own = 0;
    for (size_t g = 0; g < taken.widths.size(); ++g) {
      const ChannelGroup& group = channels.groups[g];
      own += group.loss[WidthIndex(taken.widths[g])];
      prediction.channels_by_bits[static_cast<size_t>(taken.widths[g])] +=
          static_cast<double>(group.channels * channels.latents);
    }
    choice.loss += own * scale;
    if (option.rotated()) {
      // No text is behind it: it is worth the same on any.
      for (DomainLoss& domain : prediction.domains) {
        domain.predicted += own * scale;
        domain.left_out += own * scale;
      }
      continue;
    }
    const std::vector<LatentCodes> coded =
        CodeLatents(TransformsOf(option, data.moments, spec), spec, data.fitted,
                    taken.widths);
    fitted +=
        MeasureLoss(coded, data.moments.information, spec, data.fitted).loss;
    if (data.held_out.rows.size(0) > 0) {
      const CodeLoss loss =
          MeasureLoss(coded, data.moments.information, spec, data.held_out);
      held_out += loss.loss;
      clamped += loss.clamped;
      codes += loss.codes;
    }
    JudgeDomains(request, taken, coded, prediction);
  }
  if (codes > 0) {
    prediction.held_out_loss_ratio = held_out / fitted;
    prediction.clamp_rate = clamped / codes;
  }
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
