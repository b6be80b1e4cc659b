// Smooths the queries and keys of models with QK-norm.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "plan/attention_shape.h"

namespace kvasir::worker {

// The error of a code grows with the length of the whole key. So a few large
// dimensions of a head, which come from large weights of the norm, make all
// other dimensions less accurate. This function divides each weight of the
// keys' norm by a factor and multiplies the queries' weight by it. Scores stay
// the same. The factor makes both weights about equal, because then the
// product of the lengths of query and key is smallest. Both dimensions of a
// RoPE pair have the same factor, because RoPE mixes them. (SmoothQuant, Xiao
// et al. 2023, section 4, moves the range of activations into weights in the
// same way.)
// Factors are powers of two, from 2^-12 to 2^12. So scores of uncompressed keys
// keep every bit, unless a number leaves the range of its type.
//
// `q_norm` and `k_norm`: the norms' weights [D]. `rotary_dim`: the number of
// leading dimensions that the layer rotates; 0 for none.
void SmoothQkNorms(plan::RopePairing pairing, int64_t rotary_dim,
                   absl::Span<float> q_norm, absl::Span<float> k_norm);

}  // namespace kvasir::worker
