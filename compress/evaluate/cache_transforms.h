// Transforms of keys and values that stand for caches which no plan expresses.
// baselines.h makes them by name. Tensors of keys and values are [B, T, H, D].
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

// This many bits mean whole bf16 numbers.
constexpr int64_t kExactBits = 16;

// Codes and decodes every row of `rows` [..., W] in its own range
// (fake_quant.h), or in one range per run of `group` numbers (0: W).
absl::StatusOr<at::Tensor> CodeRange(const at::Tensor& rows, int64_t bits,
                                     int64_t group = 0);

// Codes and decodes the rows of one side.
using RowCode = std::function<absl::StatusOr<at::Tensor>(const at::Tensor&)>;

// Codes each row of rotated keys and of values on its own.
std::unique_ptr<CacheTransform> MakeCodedRows(RowCode key, RowCode value);

// KIVI: keys per channel in blocks of `group` tokens, values per token in runs
// of `group` channels. If `residual` >= `group`, a token that has left the
// exact window is in a complete block for every query. Without a window (0) a
// query sees its own block as the later tokens complete it, which favours KIVI.
std::unique_ptr<CacheTransform> MakeKiviBlocks(int64_t bits, int64_t group,
                                               int64_t residual);

// Keys per channel in the ranges of a text (token ids [B, T]), before or after
// their rotation; values per token. Errors: those of the decoder.
absl::StatusOr<std::unique_ptr<CacheTransform>> MakeCalibratedKeys(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids,
    bool before_rotation, int64_t key_bits, int64_t value_bits);

// ThinK: per head and sequence, keeps the `kept` key channels that the queries
// weigh most.
std::unique_ptr<CacheTransform> MakeQueryDrivenChannels(int64_t kept,
                                                        int64_t key_bits,
                                                        int64_t value_bits);

// Replaces each sequence's keys before their rotation by their projection on
// `rank` vectors.
std::unique_ptr<CacheTransform> MakeLowRankKeys(int64_t rank);

// Tokens and layers that a baseline leaves as they are.
struct ExactRows {
  int64_t sinks = 0;   // first tokens
  int64_t window = 0;  // tokens nearest to the query
  int64_t skip = 0;    // first layers, and as many last ones
};

std::unique_ptr<CacheTransform> WithExactRows(
    std::unique_ptr<CacheTransform> coded, const ExactRows& exact,
    int64_t num_layers);

}  // namespace kvasir::compress
