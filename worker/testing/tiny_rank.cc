#include "worker/testing/tiny_rank.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/status_matchers.h"
#include "kernels/testing/strict_device.h"
#include "model/shapes/shape_config.h"

namespace kvasir::worker {

model::ModelShape TinyShape() {
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

model::ModelShape TinyNeoxShape() {
  model::ModelShape shape = TinyShape();
  shape.name = "tiny-neox-test";
  shape.family = model::Family::kNeox;
  shape.num_query_heads = shape.num_kv_heads;
  shape.rotary_part = 0.5;
  shape.qkv_bias = true;
  return shape;
}

model::ModelShape TinyOptShape() {
  model::ModelShape shape = TinyNeoxShape();
  shape.name = "tiny-opt-test";
  shape.family = model::Family::kOpt;
  shape.rotary_part = 0.0;
  shape.tied_embedding = true;
  return shape;
}

model::ModelShape TinyQwen3Shape() {
  model::ModelShape shape = TinyShape();
  shape.name = "tiny-qwen3-test";
  shape.family = model::Family::kQwen3;
  shape.hidden_size = 48;  // not the number of heads times head_dim
  return shape;
}

model::ModelShape TinyMixtralShape() {
  model::ModelShape shape = TinyShape();
  shape.name = "tiny-mixtral-test";
  shape.family = model::Family::kMixtral;
  shape.intermediate_size = 24;
  shape.num_experts = 5;
  shape.experts_per_token = 2;
  return shape;
}

model::ModelShape TinyQwen3MoeShape() {
  model::ModelShape shape = TinyQwen3Shape();
  shape.name = "tiny-qwen3-moe-test";
  shape.family = model::Family::kQwen3Moe;
  shape.intermediate_size = 16;
  shape.num_experts = 11;
  shape.experts_per_token = 3;
  return shape;
}

model::ModelShape TinyBiasedShape() {
  model::ModelShape shape = TinyShape();
  shape.name = "tiny-biased-test";
  shape.family = model::Family::kQwen2;
  shape.qkv_bias = true;
  return shape;
}

model::ModelShape TinyWindowShape(int64_t sliding_window) {
  model::ModelShape shape = TinyShape();
  shape.name = "tiny-window-test";
  shape.family = model::Family::kMistral;
  shape.sliding_window = sliding_window;
  return shape;
}

plan::ResolvedPlan Resolved(const kvasir::v1::KvPlan& plan,
                            const model::DecoderSpec& spec,
                            plan::TpShard shard) {
  auto resolved = plan::ResolvePlan(plan, model::AttentionShapeOf(spec), shard);
  KVASIR_EXPECT_OK(resolved);
  return resolved.ok() ? *std::move(resolved) : plan::ResolvedPlan();
}

std::shared_ptr<const ServedPlan> Served(const kvasir::v1::KvPlan& plan,
                                         const model::DecoderSpec& spec,
                                         const ServeOptions& options,
                                         plan::TpShard shard) {
  auto served = ServePlan(plan, model::AttentionShapeOf(spec), options, shard);
  KVASIR_EXPECT_OK(served);
  return served.ok() ? *std::move(served) : nullptr;
}

bool IsTestDeviceStrict() {
  const char* const name = std::getenv("KVASIR_TEST_DEVICE");
  KVASIR_CHECK(name == nullptr || std::string_view(name) == "strict");
  return name != nullptr;
}

void UseTestDevice(RankOptions* options) {
  if (IsTestDeviceStrict()) options->make_device = kernels::MakeStrictDevice;
}

RankOptions TinyOptions() {
  RankOptions options;
  UseTestDevice(&options);
  options.page_tokens = 16;
  options.kv_cache_bytes = 4 << 20;
  options.executor.max_model_len = 128;
  options.executor.max_num_seqs = 16;
  options.executor.max_batched_tokens = 64;
  return options;
}

absl::StatusOr<std::unique_ptr<Rank>> MakeTinyRank(
    const RankOptions& options, Collective* collective,
    const model::ModelShape& shape, kvasir::v1::DataType cache_dtype) {
  absl::StatusOr<model::DecoderSpec> spec = model::SpecOfShape(shape);
  if (!spec.ok()) return spec.status();
  constexpr uint64_t kSeed = 20260;
  RandomSource source(shape, kSeed, kernels::DType::kBf16);
  return Rank::Create(
      *spec, plan::FullRankPlan(model::AttentionShapeOf(*spec), cache_dtype),
      &source, options, collective);
}

}  // namespace kvasir::worker
