#include "compress/planner/channel_codes.h"

#include <array>
#include <cmath>

namespace kvasir::compress {
namespace {

// kNormalSteps[b] is the step of a uniform code with b bits that has the
// least error for a normal variable of variance 1. The steps are from Max
// 1960, "Quantizing for minimum distortion", table 2; the step for 8 bits was
// found numerically.
constexpr std::array<double, 9> kNormalSteps = {
    0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308};

// Factors by which kNormalSteps is multiplied in the search for the best step.
// Small factors suit flat distributions, large factors suit long tails.
constexpr std::array<double, 9> kClipFactors = {0.6,  0.75, 0.9, 1.0, 1.15,
                                                1.35, 1.6,  2.0, 2.6};

double Levels(int bits) { return static_cast<double>((1 << bits) - 1); }

// Returns (x - minimum) / scale for each number x. Where the scale is 0, the
// result is 0, because then all numbers equal the minimum.
at::Tensor Places(const at::Tensor& rows, const ChannelRanges& ranges) {
  const at::Tensor some = ranges.scale > 0;
  return at::where(
      some,
      (rows - ranges.minimum) /
          at::where(some, ranges.scale, at::ones_like(ranges.scale)),
      at::zeros({1}, rows.options()));
}

}  // namespace

at::Tensor CodedRows(const at::Tensor& rows, const ChannelRanges& ranges,
                     int bits) {
  if (bits == 0) return ranges.minimum.expand_as(rows);
  return at::round(Places(rows, ranges).clamp(0.0, Levels(bits))) *
             ranges.scale +
         ranges.minimum;
}

at::Tensor CodeErrors(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits) {
  return (CodedRows(rows, ranges, bits) - rows)
      .square_()
      .mean(0)
      .to(at::kDouble);
}

at::Tensor ClampRates(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits) {
  if (bits == 0) return at::zeros({rows.size(1)}, at::kDouble);
  const at::Tensor places = Places(rows, ranges);
  return (places < -0.5)
      .logical_or(places > Levels(bits) + 0.5)
      .to(at::kDouble)
      .mean(0);
}

ChannelRanges FitRanges(const at::Tensor& rows, int bits) {
  const at::Tensor mean = rows.to(at::kDouble).mean(0);
  if (bits == 0) return {mean.to(at::kFloat), at::zeros_like(mean, at::kFloat)};
  const at::Tensor centred = rows - mean.to(at::kFloat);
  const at::Tensor deviation = centred.square().mean(0).sqrt();
  // Rows are scaled to a variance of 1, so that the same steps suit all
  // channels.
  const at::Tensor normal =
      centred / at::where(deviation > 0, deviation, at::ones_like(deviation));
  at::Tensor least;
  at::Tensor best;
  for (const double factor : kClipFactors) {
    const double step = factor * kNormalSteps[static_cast<size_t>(bits)];
    const at::Tensor error = (normal / step)
                                 .add_(Levels(bits) / 2)
                                 .round_()
                                 .clamp_(0.0, Levels(bits))
                                 .sub_(Levels(bits) / 2)
                                 .mul_(step)
                                 .sub_(normal)
                                 .square_()
                                 .mean(0);
    const at::Tensor steps = at::full_like(error, step);
    best = best.defined() ? at::where(error < least, steps, best) : steps;
    least = least.defined() ? at::minimum(error, least) : error;
  }
  const at::Tensor scale = (deviation * best).to(at::kDouble);
  return {(mean - scale * (Levels(bits) / 2)).to(at::kFloat),
          scale.to(at::kFloat)};
}

ChannelRanges FitRanges(const at::Tensor& rows, const std::vector<int>& bits) {
  std::vector<at::Tensor> minimum;
  std::vector<at::Tensor> scale;
  size_t begin = 0;
  while (begin < bits.size()) {
    size_t end = begin;
    while (end < bits.size() && bits[end] == bits[begin]) ++end;
    const ChannelRanges run = FitRanges(
        rows.slice(1, static_cast<int64_t>(begin), static_cast<int64_t>(end)),
        bits[begin]);
    minimum.push_back(run.minimum);
    scale.push_back(run.scale);
    begin = end;
  }
  return {at::cat(minimum), at::cat(scale)};
}

}  // namespace kvasir::compress
