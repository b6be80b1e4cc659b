// Summarizes a KV plan as a table with one row per layer and side (key or
// value), for `inspect` and the metrics. A rank is the width of a latent.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/layout/layout.h"
#include "plan/resolved_plan.h"

namespace kvasir::cli {

// A group: some KV heads of a layer that share one latent.
struct GroupSummary {
  int part = 0;
  std::vector<int64_t> heads;
  int64_t rank = 0;  // the latent's length
  // how many channels of the latent are stored; channels with 0 bits are not
  int64_t stored = 0;
};

// One row of the table. If a side has several parts, a field lists their values
// with "+" between them. If keys and values share a part (a joint part), its
// bytes count for the key, and both rows show the method "joint low_rank".
struct LayerSideSummary {
  int64_t layer = 0;
  std::string side;    // "key" or "value"
  std::string method;  // the parts' spaces: "full", "low_rank+rope_low_rank"
  int64_t rank = 0;    // sum of the latents' lengths, over all parts and groups
  std::string groups;  // "8x32": 8 groups of rank 32; "2x48,40"
  std::string bits;    // "bf16", "4", "8,4,4,4,2,2,0,0"
  std::string lift;    // "-", "fold", "at_runtime", "reconstruct", "anchored"
  std::string stored;  // "pre_rope", "post_rope", "no_rope"
  std::string range;   // "-", "token", "token/32", "norm", "static", "sequence"
  std::string transform;  // "-", "hadamard_fused", "basis_static", ...
  std::vector<GroupSummary> group_list;
  double bytes_per_token = 0;  // payload, including codec parameters
  // Scales and minima; included in bytes_per_token.
  double param_bytes_per_token = 0;
  int64_t sliding_window = 0;  // 0: none
  // How many first tokens (sinks) and how many latest tokens of a sequence are
  // stored exactly, in addition to their codes.
  int64_t exact_sinks = 0;
  int64_t exact_window = 0;
};

// The bytes per token of uncompressed keys and values, in the model's own data
// type (`own`) and in bf16. The compression ratio of a plan refers to these.
struct DenseBytes {
  kvasir::v1::DataType type = kvasir::v1::BF16;
  int64_t own = 0;
  int64_t bf16 = 0;

  bool is_bf16() const { return type == kvasir::v1::BF16; }
  std::string name() const;  // "dense f32"
  std::string text() const;  // "dense f32 8192, bf16 4096"
  std::string RatioText(double bytes_per_token) const;  // "1.000 (bf16 0.500)"
};
DenseBytes DenseBytesPerToken(const cache::PageLayout& layout,
                              kvasir::v1::DataType own_type);

std::vector<LayerSideSummary> SummarizePlan(const plan::ResolvedPlan& plan,
                                            const cache::PageLayout& layout);

}  // namespace kvasir::cli
