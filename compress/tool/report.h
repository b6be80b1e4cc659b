// Makes the report of a plan: its rank table and its bytes.
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

// Returns the bytes of the plan's cache per token, including the padding of
// pages, as `kvasir inspect` shows them.
absl::StatusOr<double> BytesPerToken(const kvasir::v1::KvPlan& plan,
                                     const model::DecoderSpec& spec);

// Summarizes what each of `num_ranks` tensor-parallel ranks would hold of the
// cache. Errors: those of ResolveForRanks.
absl::StatusOr<RankSummary> RanksOfPlan(const kvasir::v1::KvPlan& plan,
                                        const model::DecoderSpec& spec,
                                        int64_t num_ranks);

// Returns the report as text. `base` is the model of the plan; the report
// compares the plan with the model's uncompressed cache.
absl::StatusOr<std::string> PlanReportText(const kvasir::v1::KvPlan& plan,
                                           const model::Checkpoint& base);
absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const kvasir::v1::KvPlan& plan, const model::Checkpoint& base);

}  // namespace kvasir::cli
