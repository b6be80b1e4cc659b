// Transforms that change keys and values as other caches would. No compression
// plan can express these caches. MakeBaseline (baselines.h) chooses a transform
// by name. Tensors of keys and values are [B, T, H, D].
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

// The bit width that means uncoded bf16 numbers.
constexpr int64_t kExactBits = 16;

// Codes every row of `rows` [..., W] and returns the decoded rows. Each run of
// `group` numbers has its own range (fake_quant.h). If `group` is 0, the whole
// row has one range.
absl::StatusOr<at::Tensor> CodeRange(const at::Tensor& rows, int64_t bits,
                                     int64_t group = 0);

// A function that codes and decodes the rows of keys or of values.
using RowCode = std::function<absl::StatusOr<at::Tensor>(const at::Tensor&)>;

// Codes each row of rotated keys with `key`, and each row of values with
// `value`.
std::unique_ptr<CacheTransform> MakeCodedRows(RowCode key, RowCode value);

// KIVI: keys are coded per channel in blocks of `group` tokens, values per
// token in runs of `group` channels. `residual` is the number of tokens nearest
// to the query that stay exact. If `residual` >= `group`, every query sees
// coded tokens only in complete blocks. If `residual` is 0, the ranges of a
// query's own block also depend on later tokens, which favours KIVI.
std::unique_ptr<CacheTransform> MakeKiviBlocks(int64_t bits, int64_t group,
                                               int64_t residual);

// Codes keys per channel, before or after their rotation, in ranges that are
// measured on a text (token ids [B, T]). Values are coded per token.
// Errors: those of the decoder.
absl::StatusOr<std::unique_ptr<CacheTransform>> MakeCalibratedKeys(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids,
    bool before_rotation, int64_t key_bits, int64_t value_bits);

// ThinK: keeps, for each head and sequence, the `kept` key channels with the
// largest product of query and key magnitudes.
std::unique_ptr<CacheTransform> MakeQueryDrivenChannels(int64_t kept,
                                                        int64_t key_bits,
                                                        int64_t value_bits);

// Replaces the keys of each sequence, before their rotation, by their
// projection on the `rank` leading singular vectors of these keys.
std::unique_ptr<CacheTransform> MakeLowRankKeys(int64_t rank);

// The tokens and layers that a baseline stores exactly.
struct ExactRows {
  int64_t sinks = 0;   // number of first tokens
  int64_t window = 0;  // number of tokens nearest to the query
  int64_t skip = 0;    // number of first layers and also of last layers
};

std::unique_ptr<CacheTransform> WithExactRows(
    std::unique_ptr<CacheTransform> coded, const ExactRows& exact,
    int64_t num_layers);

}  // namespace kvasir::compress
