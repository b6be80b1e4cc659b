#pragma once

#include "model/shapes/decoder_spec.h"
#include "plan/tp_size.h"

namespace kvasir::model {

// The sizes of the model that are divided among tensor-parallel ranks.
inline plan::TpDealt TpDealtOf(const DecoderSpec& spec) {
  return {.num_kv_heads = spec.num_kv_heads,
          .num_heads = spec.num_heads,
          .num_features = spec.intermediate_size,
          .whole_because =
              spec.qk_norm == QkNorm::kAllHeads
                  ? "the norm of queries and keys (QK-norm) sums over all heads"
                  : nullptr};
}

}  // namespace kvasir::model
