// Codes in static ranges: each channel has a minimum and a scale that are the
// same for all tokens. A number is coded as in the engine,
// round-half-even(clamp((x - minimum) / scale, 0, 2^bits - 1)), and decoded as
// code * scale + minimum. A channel of 0 bits is decoded as its minimum. Ranges
// may clip outliers. Several clip factors are tried, because real channels have
// longer tails than a normal distribution, and the factor with the least
// measured squared error is used.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Ranges of R channels, float32 [R].
struct ChannelRanges {
  at::Tensor minimum;
  at::Tensor scale;
};

// Fits ranges to rows [N, R], N > 0. Every channel has `bits` bits.
ChannelRanges FitRanges(const at::Tensor& rows, int bits);
// Fits ranges to rows [N, R]. Channel c has bits[c] bits.
ChannelRanges FitRanges(const at::Tensor& rows, const std::vector<int>& bits);

// Codes rows [N, R] in `bits` bits and returns the decoded rows, float32.
at::Tensor CodedRows(const at::Tensor& rows, const ChannelRanges& ranges,
                     int bits);

// Returns the mean squared error of each channel, [R] float64.
at::Tensor CodeErrors(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

// Returns for each channel the share of numbers that are outside their range by
// more than half a step, [R] float64. The share is 0 for channels of 0 bits,
// which have no codes.
at::Tensor ClampRates(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

}  // namespace kvasir::compress
