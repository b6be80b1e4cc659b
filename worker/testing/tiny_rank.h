// Test support: a rank of a tiny model with random weights.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "worker/program/served_plan.h"
#include "worker/ranks/rank.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// A Llama with 2 layers, 8 query heads and 4 KV heads. It can be split over 2,
// 4 or 8 ranks.
model::ModelShape TinyShape();

// Tiny models of two other families, with LayerNorm, biases and a KV head for
// each query head. RoPE rotates half of each head (2 pairs) in GPT-NeoX, and
// nothing in OPT.
model::ModelShape TinyNeoxShape();
model::ModelShape TinyOptShape();
// The model of TinyShape, but queries and keys are normalized (QK-norm).
model::ModelShape TinyQwen3Shape();
// The models of TinyShape and of TinyQwen3Shape, but with experts instead of
// the MLP.
model::ModelShape TinyMixtralShape();
model::ModelShape TinyQwen3MoeShape();
// The model of TinyShape, with biases of q, k and v.
model::ModelShape TinyBiasedShape();
// The model of TinyShape, but with this sliding window in each layer.
model::ModelShape TinyWindowShape(int64_t sliding_window);

// Both return the plan for one rank: Resolved without attention programs,
// Served with them. If the plan is not valid, the test fails.
plan::ResolvedPlan Resolved(const kvasir::v1::KvPlan& plan,
                            const model::DecoderSpec& spec,
                            plan::TpShard shard = {});
std::shared_ptr<const ServedPlan> Served(const kvasir::v1::KvPlan& plan,
                                         const model::DecoderSpec& spec,
                                         const ServeOptions& options,
                                         plan::TpShard shard = {});

// Whether the environment has KVASIR_TEST_DEVICE=strict. Then UseTestDevice
// makes the rank run on a device whose memory the host cannot touch. If the
// variable has another value, the test ends, because it would otherwise run on
// the CPU's usual device without a notice.
bool IsTestDeviceStrict();
void UseTestDevice(RankOptions* options);

RankOptions TinyOptions();

absl::StatusOr<std::unique_ptr<Rank>> MakeTinyRank(
    const RankOptions& options, Collective* collective = nullptr,
    const model::ModelShape& shape = TinyShape(),
    kvasir::v1::DataType cache_dtype = kvasir::v1::BF16);

}  // namespace kvasir::worker
