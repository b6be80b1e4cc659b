#include "kernels/latents/key_bias.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<KeyBiasParams> kKernels = {"key_bias", &KeyBiasReference,
                                               &KeyBiasSimd};

absl::Status CheckColumns(const char* what, absl::Span<const int64_t> columns,
                          int64_t heads, int64_t width, int64_t row_stride) {
  if (static_cast<int64_t>(columns.size()) != heads) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": ", what, " must have an entry for each of ", heads,
        " heads, but has ", columns.size()));
  }
  for (const int64_t column : columns) {
    if (column < 0) return Refuse(kKernels.op, what, 0, column);
    if (column + width > row_stride) {
      return Refuse(kKernels.op, "row_stride", column + width, row_stride);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const KeyBiasParams& shape, const KeyBiasTables& tables) {
  if (shape.num_kv_heads < 1) {
    return Refuse(kKernels.op, "kv_heads", 1, shape.num_kv_heads);
  }
  if (shape.num_heads < 1 || shape.num_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": the number of query heads must be a positive multiple ",
        "of the number of KV heads, ", shape.num_kv_heads, ", but is ",
        shape.num_heads));
  }
  if (shape.tile_pairs < 0) {
    return Refuse(kKernels.op, "tile_pairs", 0, shape.tile_pairs);
  }
  if (shape.exact_pairs < 0 || shape.exact_pairs > kMostExactPairs) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op, ": exact_pairs must be from 0 to ",
                     kMostExactPairs, ", but is ", shape.exact_pairs));
  }
  int exponent = 0;
  if (!(shape.unit > 0.0f) || std::frexp(shape.unit, &exponent) != 0.5f) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": unit must be a power of two, but is ", shape.unit));
  }
  const int64_t pairs =
      shape.num_kv_heads * (shape.tile_pairs + shape.exact_pairs);
  if (static_cast<int64_t>(tables.pairs.size()) != pairs) {
    return absl::InvalidArgumentError(
        absl::StrCat(kKernels.op, ": there must be ", pairs,
                     " pairs, but there are ", tables.pairs.size()));
  }
  int64_t head_dim = 0;
  for (const KeyBiasPair& pair : tables.pairs) {
    for (const int32_t index : {pair.first, pair.second}) {
      if (index < 0) return Refuse(kKernels.op, "index in a pair", 0, index);
      head_dim = std::max<int64_t>(head_dim, index + 1);
    }
  }
  KVASIR_RETURN_IF_ERROR(CheckColumns("key_column", tables.key_column,
                                      shape.num_kv_heads, head_dim,
                                      shape.row_stride));
  KVASIR_RETURN_IF_ERROR(CheckColumns("query_column", tables.query_column,
                                      shape.num_heads, head_dim,
                                      shape.row_stride));
  return CheckColumns("out_column", tables.out_column, shape.num_heads,
                      KeyBiasColumns(shape.tile_pairs, shape.exact_pairs),
                      shape.row_stride);
}

}  // namespace

absl::StatusOr<PreparedKeyBias> Prepare(Device& device,
                                        const KeyBiasParams& shape,
                                        const KeyBiasTables& tables) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  KVASIR_RETURN_IF_ERROR(Check(shape, tables));
  PreparedKeyBias prepared(&device);
  KeyBiasParams& params = prepared.params;
  params = shape;
  KVASIR_ASSIGN_OR_RETURN(params.key_column,
                          prepared.tables.Add(tables.key_column));
  KVASIR_ASSIGN_OR_RETURN(params.query_column,
                          prepared.tables.Add(tables.query_column));
  KVASIR_ASSIGN_OR_RETURN(params.out_column,
                          prepared.tables.Add(tables.out_column));
  KVASIR_ASSIGN_OR_RETURN(params.pairs, prepared.tables.Add(tables.pairs));
  return prepared;
}

absl::Status KeyBias(Stream& stream, const PreparedKeyBias& prepared,
                     const KeyBiasRows& rows, Workspace& workspace) {
  if (rows.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, rows.num_tokens);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  KeyBiasParams params = prepared.params;
  params.rows = rows.rows;
  params.positions = rows.positions;
  params.num_tokens = rows.num_tokens;
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
