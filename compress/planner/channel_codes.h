// Codes in static ranges: each channel has a minimum and a scale that are the
// same for all tokens. A number is coded as in the engine,
// round-half-even(clamp((x - minimum) / scale, 0, 2^bits - 1)), and decoded as
// code * scale + minimum. A channel of 0 bits is decoded as its minimum.
// The scale comes from the clip factor of least measured squared error among a
// handful. Real channels have tails that the formulas for a normal distribution
// do not cover.
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

// rows [N, R], N > 0; every channel has `bits`.
ChannelRanges FitRanges(const at::Tensor& rows, int bits);
// Channel c has bits[c] bits.
ChannelRanges FitRanges(const at::Tensor& rows, const std::vector<int>& bits);

// Codes rows [N, R] in `bits` and decodes them; float32.
at::Tensor CodedRows(const at::Tensor& rows, const ChannelRanges& ranges,
                     int bits);

// Mean squared error of each channel, [R] float64.
at::Tensor CodeErrors(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

// Share of the numbers that are outside their range by more than half a step,
// [R] float64. 0 for 0 bits, which have no codes.
at::Tensor ClampRates(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

}  // namespace kvasir::compress
