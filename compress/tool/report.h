// The report of a plan: its rank table and its bytes.
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

// Includes the padding of pages, as in `kvasir inspect`.
absl::StatusOr<double> BytesPerToken(const kvasir::v1::KvPlan& plan,
                                     const model::DecoderSpec& spec);

// The share of the cache that each of `tp` ranks would hold. Errors: those of
// ResolveForRanks.
absl::StatusOr<RankSummary> RanksOfPlan(const kvasir::v1::KvPlan& plan,
                                        const model::DecoderSpec& spec,
                                        int64_t num_ranks);

// `base` is the model of the plan; its dense cache is the baseline.
absl::StatusOr<std::string> PlanReportText(const kvasir::v1::KvPlan& plan,
                                           const model::Checkpoint& base);
absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const kvasir::v1::KvPlan& plan, const model::Checkpoint& base);

}  // namespace kvasir::cli
