// Test support: a rank of a tiny random-weight model.
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

// 8 query heads, 4 KV heads, 2 layers: splits over 2 or 4 ranks.
model::ModelShape TinyShape();

// The same in two families of LayerNorm, with biases and a KV head for each
// query head: half of a GPT-NeoX head turns (2 pairs), nothing in OPT.
model::ModelShape TinyNeoxShape();
model::ModelShape TinyOptShape();
// All layers see so many tokens back.
model::ModelShape TinyWindowShape(int64_t sliding_window);

// The plan as a rank of the model has it, and runs it.
plan::ResolvedPlan Resolved(const kvasir::v1::KvPlan& plan,
                            const model::DecoderSpec& spec,
                            plan::TpShard shard = {});
std::shared_ptr<const ServedPlan> Served(const kvasir::v1::KvPlan& plan,
                                         const model::DecoderSpec& spec,
                                         const ServeOptions& options,
                                         plan::TpShard shard = {});

// KVASIR_TEST_DEVICE=strict: the rank runs on a device whose memory the host
// cannot touch. Another name ends the test: it would run on the CPU's device
// and prove nothing.
bool IsTestDeviceStrict();
void UseTestDevice(RankOptions* options);

RankOptions TinyOptions();

absl::StatusOr<std::unique_ptr<Rank>> MakeTinyRank(
    const RankOptions& options, Collective* collective = nullptr,
    const model::ModelShape& shape = TinyShape(),
    kvasir::v1::DataType cache_dtype = kvasir::v1::BF16);

}  // namespace kvasir::worker
