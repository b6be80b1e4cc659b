// The caches that `kvasir bench decode --eviction-cost` compares.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "plan/eviction.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// KV heads that keep the same tokens.
enum class EvictionUnit { kLayer, kKvHead };

// `plan` with an eviction by these units in place of its own. Errors:
// ApplyEviction's and ValidatePlan's.
absl::StatusOr<kvasir::v1::KvPlan> EvictingPlan(
    const plan::EvictionSettings& settings, EvictionUnit unit,
    const plan::AttentionShape& shape, kvasir::v1::KvPlan plan);

// The same cache, whose layers evict nothing.
kvasir::v1::KvPlan WithoutEviction(kvasir::v1::KvPlan plan);

// Fewest bits of any code that is stored; 16: none is.
int64_t FewestBits(const kvasir::v1::KvPlan& plan);

}  // namespace kvasir::cli
