// Imitates how vLLM and llama.cpp quantize their caches; fake_quant.h has
// Kvasir's own codes. The functions code rows of numbers and return the decoded
// rows. A row [..., W] is the key or value of one token and head.
//
// Errors: InvalidArgument for a row whose scale does not fit into a float16.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// TurboQuant's codes (Zandieh et al. 2025, algorithm 1), as vLLM stores them.
// Random signs and a Hadamard matrix rotate the row, so that its numbers are
// nearly normally distributed for any input. Each number is rounded to a
// Lloyd-Max level. One float16 stores the scale with which the decoded row has
// the length (2-norm) of the row.
absl::StatusOr<at::Tensor> CodeRotated(const at::Tensor& rows, int64_t bits);

// ggml's codes: each block of 32 numbers has one float16 scale. The scale of
// q8_0 is the greatest magnitude divided by 127; that of q4_0 is the number
// with the greatest magnitude divided by -8. W is a multiple of 32.
enum class Ggml { kQ8_0, kQ4_0 };
constexpr int64_t kGgmlBlock = 32;
// Codes and decodes rows with one of ggml's codes. If `rotate` is true, rows
// are multiplied by a Hadamard matrix before they are coded, and by its inverse
// afterwards.
absl::StatusOr<at::Tensor> CodeGgml(const at::Tensor& rows, Ggml type,
                                    bool rotate);

// 8-bit float types. Every number is rounded to the nearest number of the type,
// ties to even, without a scale. Numbers beyond the greatest one become the
// greatest one.
enum class Float8 { kE4M3, kE5M2 };
at::Tensor RoundToFloat8(const at::Tensor& numbers, Float8 type);

}  // namespace kvasir::compress
