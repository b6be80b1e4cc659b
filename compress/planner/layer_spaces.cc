#include "compress/planner/layer_spaces.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "compress/planner/channel_codes.h"

namespace kvasir::compress {
namespace {

// Number of channels (of rope_low_rank: complex channels) that share a
// bit width.
constexpr int64_t kGroupChannels = 8;

// Returns the bit width of each channel of a latent.
std::vector<int> BitsOf(const LatentTransform& transform,
                        const std::vector<int>& widths) {
  std::vector<int> bits(static_cast<size_t>(transform.rank));
  const std::vector<std::vector<int64_t>> groups = WidthGroups(transform);
  KVASIR_CHECK(groups.size() == widths.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int64_t channel : groups[g]) {
      bits[static_cast<size_t>(channel)] = widths[g];
    }
  }
  return bits;
}

// A run of channels [begin, end) with equal bits, as long as possible.
struct BitRange {
  int64_t begin = 0;
  int64_t end = 0;
  int bits = 0;
};
std::vector<BitRange> RangesOf(const std::vector<int>& bits) {
  std::vector<BitRange> ranges;
  for (size_t c = 0; c < bits.size(); ++c) {
    const auto channel = static_cast<int64_t>(c);
    if (c == 0 || bits[c] != bits[c - 1]) {
      ranges.push_back({channel, channel, bits[c]});
    }
    ranges.back().end = channel + 1;
  }
  return ranges;
}

}  // namespace

std::string SpaceOption::Name(int64_t num_kv_heads) const {
  const char* const names[] = {"joint",  "keys",         "rope keys",
                               "values", "rotated keys", "rotated values"};
  const size_t heads = groups[0].size();
  return absl::StrCat(names[static_cast<size_t>(kind)], " ",
                      static_cast<int64_t>(heads) == num_kv_heads && heads > 1
                          ? "all"
                          : absl::StrCat(heads));
}

at::Tensor SpreadPositions(int64_t count, int64_t span) {
  // For any count, the fractional parts of the first `count` multiples of the
  // golden ratio are spread evenly over [0, 1).
  constexpr double kGoldenShare = 0.6180339887498949;
  const at::Tensor turns = at::arange(count, at::kDouble) * kGoldenShare;
  return ((turns - turns.floor()) * static_cast<double>(span))
      .floor()
      .to(at::kLong);
}

std::vector<LatentTransform> TransformsOf(const SpaceOption& option,
                                          const LayerMoments& moments,
                                          const model::DecoderSpec& spec) {
  std::vector<LatentTransform> transforms;
  for (const std::vector<int64_t>& heads : option.groups) {
    LatentTransform transform;
    transform.columns =
        ColumnsOfHeads(spec, heads, option.keys(), option.values());
    if (option.kind == SpaceKind::kRopeKey) {
      RopeBasis found = RopeLowRankBasis(moments, spec, heads);
      transform.encode = found.encode;
      transform.decode = found.decode;
      transform.pairs = std::move(found.basis.pairs);
    } else {
      const FisherBasis basis =
          LowRankBasis(moments, transform.columns,
                       std::min(static_cast<int64_t>(transform.columns.size()),
                                spec.hidden_size));
      transform.encode = basis.encode;
      transform.decode = basis.decode;
    }
    transform.rank = transform.encode.size(0);
    transforms.push_back(std::move(transform));
  }
  return transforms;
}

at::Tensor LatentRows(const LatentTransform& transform,
                      const model::DecoderSpec& spec,
                      const SampleRows& sample) {
  const at::Tensor latents =
      sample.rows.index_select(1, at::tensor(transform.columns, at::kLong))
          .mm(transform.encode.to(at::kFloat).t());
  if (transform.pairs.empty()) return latents;
  return TurnedChannels(latents, spec.rope, transform.pairs, sample.positions);
}

std::vector<std::vector<int64_t>> WidthGroups(
    const LatentTransform& transform) {
  const int64_t width = transform.rank;
  // The real part of complex channel c is channel c, and the imaginary part is
  // channel half + c.
  const int64_t half = transform.pairs.empty() ? 0 : width / 2;
  const int64_t end = half == 0 ? width : half;
  std::vector<std::vector<int64_t>> groups;
  for (int64_t begin = 0; begin < end; begin += kGroupChannels) {
    std::vector<int64_t> group;
    for (int64_t c = begin; c < std::min(begin + kGroupChannels, end); ++c) {
      group.push_back(c);
      if (half > 0) group.push_back(half + c);
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

PartChannels MeasureChannels(const std::vector<LatentTransform>& transforms,
                             const model::DecoderSpec& spec,
                             const SampleRows& sample) {
  PartChannels part;
  for (const LatentTransform& transform : transforms) {
    const at::Tensor latents = LatentRows(transform, spec, sample);
    const bool turns = !transform.pairs.empty();
    const std::vector<std::vector<int64_t>> groups = WidthGroups(transform);
    part.groups.resize(groups.size());
    for (size_t w = 0; w < kCodeWidths.size(); ++w) {
      const int bits = kCodeWidths[w];
      const at::Tensor errors =
          CodeErrors(latents, FitRanges(latents, bits), bits).contiguous();
      const double* const error = errors.data_ptr<double>();
      for (size_t g = 0; g < groups.size(); ++g) {
        part.groups[g].channels = static_cast<int64_t>(groups[g].size());
        for (const int64_t channel : groups[g]) {
          part.groups[g].loss[w] +=
              bits == 0 && turns ? kImpossible : error[channel] / 2;
        }
      }
    }
  }
  return part;
}

PartChannels RotatedChannels(const SpaceOption& option,
                             const LayerMoments& moments,
                             const model::DecoderSpec& spec) {
  struct Distortion {
    int bits;
    double normal_error;
  };
  constexpr Distortion kDistortions[] = {
      {2, 0.1175}, {3, 0.03454}, {4, 0.009497}};
  const at::Tensor energy =
      moments.covariance.diagonal() + moments.coded_mean.square();
  const at::Tensor information = moments.information.diagonal();
  double loss = 0;
  for (const std::vector<int64_t>& heads : option.groups) {
    const at::Tensor columns = at::tensor(
        ColumnsOfHeads(spec, heads, option.keys(), option.values()), at::kLong);
    loss += energy.index_select(0, columns).sum().item<double>() *
            information.index_select(0, columns).mean().item<double>() / 2;
  }
  PartChannels part;
  part.param_bytes = 2;
  ChannelGroup& group = part.groups.emplace_back();
  group.channels = spec.head_dim;
  group.loss.fill(kImpossible);
  for (const Distortion& distortion : kDistortions) {
    const auto* const width =
        std::find(kCodeWidths.begin(), kCodeWidths.end(), distortion.bits);
    group.loss[static_cast<size_t>(width - kCodeWidths.begin())] =
        loss * distortion.normal_error;
  }
  return part;
}

std::vector<LatentCodes> CodeLatents(std::vector<LatentTransform> transforms,
                                     const model::DecoderSpec& spec,
                                     const SampleRows& sample,
                                     const std::vector<int>& widths) {
  std::vector<LatentCodes> coded;
  for (LatentTransform& transform : transforms) {
    const std::vector<int> bits = BitsOf(transform, widths);
    const ChannelRanges ranges =
        FitRanges(LatentRows(transform, spec, sample), bits);
    coded.push_back({std::move(transform), bits, ranges.minimum, ranges.scale});
  }
  return coded;
}

CodeLoss MeasureLoss(const std::vector<LatentCodes>& latents,
                     const at::Tensor& information,
                     const model::DecoderSpec& spec, const SampleRows& sample) {
  CodeLoss total;
  for (const LatentCodes& latent : latents) {
    const LatentTransform& transform = latent.transform;
    const at::Tensor rows = LatentRows(transform, spec, sample);
    std::vector<at::Tensor> errors;
    for (const BitRange& range : RangesOf(latent.bits)) {
      const ChannelRanges ranges = {
          latent.minimum.slice(0, range.begin, range.end),
          latent.scale.slice(0, range.begin, range.end)};
      const at::Tensor part = rows.slice(1, range.begin, range.end);
      errors.push_back(CodedRows(part, ranges, range.bits) - part);
      if (range.bits == 0) continue;
      total.clamped +=
          ClampRates(part, ranges, range.bits).sum().item<double>();
      total.codes += static_cast<double>(range.end - range.begin);
    }
    at::Tensor error = at::cat(errors, 1);
    if (!transform.pairs.empty()) {
      error =
          TurnedChannels(error, spec.rope, transform.pairs, -sample.positions);
    }
    const at::Tensor index = at::tensor(transform.columns, at::kLong);
    const at::Tensor metric =
        information.index_select(0, index).index_select(1, index);
    // The mean loss of errors e is E[e^T F e] / 2 = tr(F E[e e^T]) / 2.
    const at::Tensor moment =
        error.t().mm(error).to(at::kDouble) / error.size(0);
    const at::Tensor latent_metric =
        transform.decode.t().mm(metric).mm(transform.decode);
    total.loss += moment.mul(latent_metric).sum().item<double>() / 2;
  }
  return total;
}

void SetRuns(const LatentTransform& transform, const std::vector<int>& widths,
             kvasir::v1::Codec& codec) {
  for (const BitRange& range : RangesOf(BitsOf(transform, widths))) {
    auto* run = codec.mutable_bits()->add_runs();
    run->set_channels(static_cast<uint32_t>(range.end - range.begin));
    run->set_bits(static_cast<uint32_t>(range.bits));
  }
}

}  // namespace kvasir::compress
