// Codes in static ranges: of each channel a minimum and a scale, the same for
// all tokens. As the engine codes: round-half-even(clamp((x - minimum) / scale,
// 0, 2^bits - 1)), and a code stands for code * scale + minimum. A channel of 0
// bits stands for its minimum.
//
// The scale is the one of a handful of clip factors with the least measured
// squared error: real channels have tails that no formula for a normal
// distribution knows.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Of R channels, float32 [R].
struct ChannelRanges {
  at::Tensor minimum;
  at::Tensor scale;
};

// rows [N, R], N > 0; every channel has `bits`.
ChannelRanges FitRanges(const at::Tensor& rows, int bits);
// Channel c has bits[c].
ChannelRanges FitRanges(const at::Tensor& rows, const std::vector<int>& bits);

// What codes of `bits` make of rows [N, R]; float32.
at::Tensor CodedRows(const at::Tensor& rows, const ChannelRanges& ranges,
                     int bits);

// Mean squared error of each channel, [R] float64.
at::Tensor CodeErrors(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

// Share of the numbers that lie outside of their range by more than half a
// step. [R] float64; 0 for 0 bits, which have no codes.
at::Tensor ClampRates(const at::Tensor& rows, const ChannelRanges& ranges,
                      int bits);

}  // namespace kvasir::compress
