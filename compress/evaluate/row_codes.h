// Codes of rows of numbers as other servers use them in their caches, in
// addition to the ranges of fake_quant.h. The functions return the decoded
// rows. A row is one token of one head, [..., W].
//
// Errors: InvalidArgument for a row whose scale is no float16.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// TurboQuant's codes (Zandieh et al. 2025, algorithm 1), as vLLM stores them.
// Random signs and a Hadamard matrix rotate the row, so that its numbers are
// nearly normal whatever they were. Each number is rounded to a Lloyd-Max
// level, and one float16 keeps the row's length, which the decoded row has
// again.
absl::StatusOr<at::Tensor> CodeRotated(const at::Tensor& rows, int64_t bits);

// Blocks of 32 numbers and one float16 scale, as in ggml. q8_0 rounds to 127ths
// of the greatest magnitude, q4_0 to 8ths of the number of greatest magnitude.
// W is a multiple of 32.
enum class Ggml { kQ8_0, kQ4_0 };
constexpr int64_t kGgmlBlock = 32;
// If `rotate`, codes between a Hadamard matrix and its inverse.
absl::StatusOr<at::Tensor> CodeGgml(const at::Tensor& rows, Ggml type,
                                    bool rotate);

// Rounds every number to the nearest one of the type, ties to even. Numbers
// beyond the greatest become the greatest.
enum class Float8 { kE4M3, kE5M2 };
at::Tensor RoundToFloat8(const at::Tensor& numbers, Float8 type);

}  // namespace kvasir::compress
