// Test support: a rank of a tiny random-weight model.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "cache/plan.h"
#include "model/shape_config.h"
#include "model/shapes.h"
#include "worker/rank.h"
#include "worker/weight_source.h"

namespace kvasir::worker {

// 4 query heads, 4 KV heads, 2 layers: splits over 2 or 4 ranks.
inline model::ModelShape TinyShape() {
  return {.name = "tiny-test",
          .num_layers = 2,
          .hidden_size = 32,
          .intermediate_size = 48,
          .num_query_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 8,
          .vocab_size = 1237,
          .max_position = 512};
}

inline RankOptions TinyOptions() {
  RankOptions options;
  options.page_tokens = 16;
  options.kv_cache_bytes = 4 << 20;
  options.executor.max_model_len = 128;
  options.executor.max_num_seqs = 16;
  options.executor.max_batched_tokens = 64;
  return options;
}

inline absl::StatusOr<std::unique_ptr<Rank>> MakeTinyRank(
    const RankOptions& options, Collective* collective = nullptr,
    const model::ModelShape& shape = TinyShape(),
    kvasir::v1::DataType cache_dtype = kvasir::v1::BF16) {
  absl::StatusOr<model::DecoderSpec> spec = model::SpecOfShape(shape);
  if (!spec.ok()) return spec.status();
  constexpr uint64_t kSeed = 20260;
  RandomSource source(shape, kSeed, kernels::DType::kBf16);
  return Rank::Create(*spec,
                      cache::FullRankPlan(CacheShapeOf(*spec), cache_dtype),
                      &source, options, collective);
}

}  // namespace kvasir::worker
