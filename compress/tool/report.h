// What kvasir-compress says of a plan: its rank table and its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/decoder_spec.h"
#include "nlohmann/json_fwd.hpp"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "summary/rank_summary.h"

namespace kvasir::cli {

// Pages' padding included, as `kvasir inspect` counts it.
absl::StatusOr<double> BytesPerToken(const kvasir::v1::KvPlan& plan,
                                     const model::DecoderSpec& spec);

// What each of so many ranks would hold of the cache. ResolveForRanks's errors.
absl::StatusOr<RankSummary> RanksOfPlan(const kvasir::v1::KvPlan& plan,
                                        const model::DecoderSpec& spec,
                                        int64_t num_ranks);

// `base`: what the plan is for, and compared with.
absl::StatusOr<std::string> PlanReportText(const kvasir::v1::KvPlan& plan,
                                           const model::Checkpoint& base);
absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const kvasir::v1::KvPlan& plan, const model::Checkpoint& base);

}  // namespace kvasir::cli
