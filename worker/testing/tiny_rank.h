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

// 8 query heads, 4 KV heads, 2 layers. It can be split over 2 or 4 ranks.
model::ModelShape TinyShape();

// Tiny models of two families with LayerNorm, biases and a KV head for each
// query head. In GPT-NeoX half of a head rotates (2 pairs), in OPT nothing.
model::ModelShape TinyNeoxShape();
model::ModelShape TinyOptShape();
// Each layer sees only this many tokens back.
model::ModelShape TinyWindowShape(int64_t sliding_window);

// The plan as resolved for a rank, and as the rank runs it.
plan::ResolvedPlan Resolved(const kvasir::v1::KvPlan& plan,
                            const model::DecoderSpec& spec,
                            plan::TpShard shard = {});
std::shared_ptr<const ServedPlan> Served(const kvasir::v1::KvPlan& plan,
                                         const model::DecoderSpec& spec,
                                         const ServeOptions& options,
                                         plan::TpShard shard = {});

// With KVASIR_TEST_DEVICE=strict the rank runs on a device with memory that the
// host cannot touch. Any other value ends the test, because it would silently
// run on the CPU's device.
bool IsTestDeviceStrict();
void UseTestDevice(RankOptions* options);

RankOptions TinyOptions();

absl::StatusOr<std::unique_ptr<Rank>> MakeTinyRank(
    const RankOptions& options, Collective* collective = nullptr,
    const model::ModelShape& shape = TinyShape(),
    kvasir::v1::DataType cache_dtype = kvasir::v1::BF16);

}  // namespace kvasir::worker
