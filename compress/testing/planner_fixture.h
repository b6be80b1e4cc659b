// Test support: small models, calibrations and codecs for the tests of
// planners.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "compress/methods/method.h"
#include "model/shapes/attention_shape.h"
#include "plan/replicas.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

struct TinyModel {
  int64_t layers = 3;
  int64_t heads = 8;
  int64_t kv_heads = 4;
  int64_t head_dim = 16;
  int64_t hidden = 96;
  int64_t rotary_dim = 16;
  bool bias = false;
  model::RopePairing pairing = model::RopePairing::kHalfSplit;
};

inline model::DecoderSpec SpecOf(const TinyModel& model) {
  model::DecoderSpec spec;
  spec.hidden_size = model.hidden;
  spec.num_heads = model.heads;
  spec.num_kv_heads = model.kv_heads;
  spec.head_dim = model.head_dim;
  spec.rope.rotary_dim = model.rotary_dim;
  spec.rope.pairing = model.pairing;
  for (int64_t pair = 0; pair < model.rotary_dim / 2; ++pair) {
    spec.rope.frequencies.push_back(std::pow(0.3, static_cast<double>(pair)));
  }
  spec.qkv_bias = model.bias;
  spec.layers.resize(static_cast<size_t>(model.layers));
  return spec;
}

inline kvasir::v1::Codec NumberCodec(kvasir::v1::DataType dtype) {
  kvasir::v1::Codec codec;
  codec.set_dtype(dtype);
  return codec;
}

inline kvasir::v1::Codec BitsCodec(uint32_t bits) {
  kvasir::v1::Codec codec;
  codec.mutable_bits()->add_schedule(bits);
  codec.mutable_per_token();
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

inline PlanRequest RequestOf(const TinyModel& model) {
  PlanRequest request;
  request.spec = SpecOf(model);
  request.key_codec = NumberCodec(kvasir::v1::BF16);
  request.value_codec = NumberCodec(kvasir::v1::BF16);
  return request;
}

inline at::Tensor RandomMatrix(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::kFloat);
}

// Makes a calibration with random Fisher scores of the projection rows. They
// differ strongly between layers, between keys and values, and between heads.
inline Calibration FisherCalibration(const model::DecoderSpec& spec,
                                     uint64_t seed) {
  Calibration calibration;
  calibration.id = "test-calibration";
  calibration.num_tokens = 64;
  const int64_t rows = spec.num_kv_heads * spec.head_dim;
  const auto scores = [&](uint64_t which) {
    const at::Tensor heads =
        RandomMatrix({spec.num_kv_heads, 1}, seed * 100 + which);
    return heads.exp()
        .expand({spec.num_kv_heads, spec.head_dim})
        .reshape({rows})
        .to(at::kDouble);
  };
  for (uint64_t l = 0; l < spec.layers.size(); ++l) {
    LayerCalibration layer;
    layer.key_fisher_root = scores(4 * l);
    layer.value_fisher_root = 3 * scores(4 * l + 1);
    layer.key_fisher = scores(4 * l + 2);
    layer.value_fisher = 3 * scores(4 * l + 3);
    calibration.layers.push_back(layer);
  }
  return calibration;
}

// Returns how many numbers the plan keeps for a token, in the keys and values
// of all layers.
inline int64_t KeptBy(const kvasir::v1::KvPlan& plan,
                      const model::DecoderSpec& spec) {
  int64_t kept = 0;
  for (const auto& layer : plan.layers()) {
    for (const auto* side : {&layer.key(), &layer.value()}) {
      for (const auto& part : side->parts()) {
        if (part.has_full()) kept += spec.num_kv_heads * spec.head_dim;
        for (const auto& group : part.low_rank().groups()) {
          kept += group.rank();
        }
      }
    }
  }
  return kept;
}

inline std::vector<int64_t> RanksOf(const kvasir::v1::Part& part) {
  std::vector<int64_t> ranks;
  for (const auto& group : part.low_rank().groups()) {
    ranks.push_back(group.rank());
  }
  return ranks;
}

// Returns the payload bytes of a token's keys and values, summed over layers
// and the page layouts of all tensor-parallel ranks.
inline double LaidOutBytes(const kvasir::v1::KvPlan& plan,
                           const model::DecoderSpec& spec) {
  double bytes = 0;
  for (int64_t rank = 0; rank < plan.target().tp(); ++rank) {
    const auto layout =
        cache::PageLayout::Create(plan, model::AttentionShapeOf(spec), {},
                                  {.rank = rank, .size = plan.target().tp()});
    if (!layout.ok()) return std::nan("");
    for (int64_t l = 0; l < spec.num_layers(); ++l) {
      for (plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
        bytes += layout->PayloadBytesPerToken(l, side);
      }
    }
  }
  return bytes;
}

// Expects that in every layer the pages of all tensor-parallel ranks have the
// same size, and that no two ranks store the same data.
inline void ExpectEqualRanks(const kvasir::v1::KvPlan& plan,
                             const model::DecoderSpec& spec) {
  const int64_t size = plan.target().tp();
  std::vector<std::shared_ptr<const plan::ResolvedPlan>> ranks;
  // page_bytes[rank][layer]
  std::vector<std::vector<int64_t>> page_bytes;
  for (int64_t rank = 0; rank < size; ++rank) {
    auto resolved = plan::ResolvePlan(plan, model::AttentionShapeOf(spec),
                                      {.rank = rank, .size = size});
    KVASIR_ASSERT_OK(resolved);
    const auto layout = cache::PageLayout::Create(*resolved, {});
    KVASIR_ASSERT_OK(layout);
    ranks.push_back(
        std::make_shared<const plan::ResolvedPlan>(*std::move(resolved)));
    auto& rank_bytes = page_bytes.emplace_back();
    for (const cache::LayerLayout& layer : layout->layers()) {
      rank_bytes.push_back(layer.page_bytes);
    }
    EXPECT_EQ(rank_bytes, page_bytes[0]) << "rank " << rank << " of " << size;
  }
  EXPECT_GT(size, 1);
  EXPECT_TRUE(plan::FindReplicas(ranks).empty());
}

}  // namespace kvasir::compress
