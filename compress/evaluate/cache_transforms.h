// Caches between keys and queries, that no plan expresses: what baselines.h
// makes by name. Tensors of keys and values are [B, T, H, D].
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

// Bits that stand for whole bf16 numbers.
constexpr int64_t kExactBits = 16;

// Every row of `rows` [..., W] by its own range (fake_quant.h), in runs of
// `group` numbers (0: W).
absl::StatusOr<at::Tensor> CodeRange(const at::Tensor& rows, int64_t bits,
                                     int64_t group = 0);

// What comes back of the rows of one side.
using RowCode = std::function<absl::StatusOr<at::Tensor>(const at::Tensor&)>;

// Rows of rotated keys and of values, each on its own.
std::unique_ptr<CacheTransform> MakeCodedRows(RowCode key, RowCode value);

// KIVI: keys per channel in blocks of `group` tokens, values per token in runs
// of `group` channels. With `residual` >= `group` the block of a token that has
// left the exact window is complete, whatever the query. Without a window (0) a
// query sees its own block as the later tokens complete it, in KIVI's favour.
std::unique_ptr<CacheTransform> MakeKiviBlocks(int64_t bits, int64_t group,
                                               int64_t residual);

// Keys per channel in the ranges of a text (token ids [B, T]), before or after
// their rotation; values per token. Errors: the decoder's.
absl::StatusOr<std::unique_ptr<CacheTransform>> MakeCalibratedKeys(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids,
    bool before_rotation, int64_t key_bits, int64_t value_bits);

// ThinK: per head and sequence, the `kept` key channels that queries meet most.
std::unique_ptr<CacheTransform> MakeQueryDrivenChannels(int64_t kept,
                                                        int64_t key_bits,
                                                        int64_t value_bits);

// Each sequence's keys before their rotation, by `rank` vectors.
std::unique_ptr<CacheTransform> MakeLowRankKeys(int64_t rank);

// What every baseline may leave as it is.
struct ExactRows {
  int64_t sinks = 0;   // first tokens
  int64_t window = 0;  // tokens nearest to the query
  int64_t skip = 0;    // first layers, and as many last ones
};

std::unique_ptr<CacheTransform> WithExactRows(
    std::unique_ptr<CacheTransform> coded, const ExactRows& exact,
    int64_t num_layers);

}  // namespace kvasir::compress
