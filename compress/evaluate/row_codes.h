// Codes of rows of numbers that other servers keep their caches in, beside the
// ranges of fake_quant.h: what comes back out of them. A row is one token of
// one head, [..., W].
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// TurboQuant's codes (Zandieh et al. 2025, algorithm 1), as vLLM stores them:
// random signs and a Hadamard matrix turn the row, so that its numbers are
// nearly normal whatever they were; each is rounded to a Lloyd-Max level, and
// one float16 says how long the row was. What comes back is as long as that.
absl::StatusOr<at::Tensor> CodeRotated(const at::Tensor& rows, int64_t bits);

// Blocks of 32 numbers and one float16 scale, as ggml has them: q8_0 rounds to
// 127ths of the greatest magnitude, q4_0 to 8ths of the number of greatest
// magnitude. W is a multiple of 32.
enum class Ggml { kQ8_0, kQ4_0 };
constexpr int64_t kGgmlBlock = 32;
// With `rotate`, between a Hadamard matrix and its inverse.
absl::StatusOr<at::Tensor> CodeGgml(const at::Tensor& rows, Ggml type,
                                    bool rotate);

// Every number on its own, to the nearest of the type, ties to even; beyond the
// greatest it is the greatest.
enum class Float8 { kE4M3, kE5M2 };
at::Tensor RoundToFloat8(const at::Tensor& numbers, Float8 type);

// Errors of all: InvalidArgument for rows whose scale is no float16.

}  // namespace kvasir::compress
