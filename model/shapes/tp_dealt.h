#pragma once

#include <numeric>

#include "model/shapes/decoder_spec.h"
#include "plan/tp_size.h"

namespace kvasir::model {

// The sizes of the model that are divided among tensor-parallel ranks. Every
// rank holds a part of each expert. If only some layers have experts, the
// number of ranks must divide the features of an expert and those of an MLP.
inline plan::TpDealt TpDealtOf(const DecoderSpec& spec) {
  const int64_t expert_layers = spec.num_expert_layers();
  int64_t features =
      expert_layers == spec.num_layers() ? 0 : spec.intermediate_size;
  if (expert_layers > 0) {
    features = std::gcd(features, spec.experts.intermediate_size);
  }
  return {.num_kv_heads = spec.num_kv_heads,
          .num_heads = spec.num_heads,
          .num_features = features,
          .whole_because =
              spec.qk_norm == QkNorm::kAllHeads
                  ? "the norm of queries and keys (QK-norm) sums over all heads"
                  : nullptr};
}

}  // namespace kvasir::model
