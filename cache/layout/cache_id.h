// Names what cached latents mean: two processes with one cache_id put the same
// numbers (up to the engine's arithmetic) into the pages of the same tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cache/layout/layout.h"
#include "plan/plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cache {

// How positions enter keys.
struct RopeIdentity {
  // Pair f is (2f, 2f + 1) instead of (f, f + rotary_dim / 2).
  bool interleaved = false;
  // Radians per position of each pair, scaling applied.
  std::vector<double> frequencies;
  double attention_factor = 1.0;
};

struct CacheIdentity {
  plan::AttentionShape shape;
  int64_t page_tokens = 0;
  RopeIdentity rope;
  // Of every tensor that shapes the cache, by the loader.
  std::string tensor_fingerprint;
};

// 32 hexadecimal digits over the plan's key and value sides (spaces, lifts,
// codecs) and the identity. Eviction and selection do not enter, for a request
// may override them; nor do page layout and tensor-parallel split, which do not
// change what a token's latents are.
std::string CacheId(const kvasir::v1::KvPlan& plan,
                    const CacheIdentity& identity);

// For the header of page images: pages of the same id have every byte in the
// same place, and belong to the same rank of the same number of ranks. What the
// bytes mean is the cache_id's to say. 32 hex digits.
std::string PageFormatId(const PageLayout& layout);

}  // namespace kvasir::cache
