// Computes ids for cached data. Two processes with the same cache_id store the
// same latents for the same tokens, except for rounding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cache/layout/layout.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cache {

// The settings of RoPE that change cached keys.
struct RopeIdentity {
  // If true, RoPE rotates dimensions 2f and 2f + 1 as pair f. Otherwise pair f
  // has dimensions f and f + rotary_dim / 2.
  bool interleaved = false;
  // Radians per position for each pair, with scaling applied.
  std::vector<double> frequencies;
  double attention_factor = 1.0;
};

struct CacheIdentity {
  plan::AttentionShape shape;
  int64_t page_tokens = 0;
  RopeIdentity rope;
  // True if at least one layer stores keys without the bias of the
  // key projection.
  bool key_bias_left_out = false;
  // Identifies how the means that the cache subtracts from keys were measured.
  // Empty if it subtracts no means.
  std::string key_means;
  // The loader's fingerprint of all tensors that affect the cached latents.
  std::string tensor_fingerprint;
};

// A hash, as 32 hex digits, of the plan's key and value sides (spaces, lifts,
// codecs), joint parts and exact sinks, and of the identity. Eviction and
// selection are left out, because a request may override them. Page layout and
// tensor-parallel split are left out: they do not change a token's latents.
std::string CacheId(const kvasir::v1::KvPlan& plan,
                    const CacheIdentity& identity);

// A hash, as 32 hex digits, for the header of page images. Processes with equal
// ids store every byte of a page in the same place. They are also the same rank
// of the same number of ranks. The cache_id identifies what the bytes mean.
std::string PageFormatId(const PageLayout& layout);

}  // namespace kvasir::cache
