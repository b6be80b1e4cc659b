// What kvasir-compress says of a plan: its rank table and its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "cache/layout.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/decoder_spec.h"
#include "nlohmann/json_fwd.hpp"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// The whole model's layout, as `kvasir inspect` counts it.
absl::StatusOr<cache::PageLayout> LayoutOfPlan(const kvasir::v1::KvPlan& plan,
                                               const model::DecoderSpec& spec);

// Pages' padding included.
absl::StatusOr<double> BytesPerToken(const kvasir::v1::KvPlan& plan,
                                     const model::DecoderSpec& spec);

struct PlanBytes {
  double per_token = 0;       // padding included
  double payload = 0;         // without it
  double parameters = 0;      // of the payload: scales and minima
  int64_t per_sequence = 0;   // side pages
  int64_t static_ranges = 0;  // once for the model: CHANNEL_STATIC
  int64_t static_bases = 0;   // once for the model: BASIS_STATIC, float16
  double kept_numbers = 0;    // share of the dense cache's
};
PlanBytes CountPlan(const kvasir::v1::KvPlan& plan,
                    const model::DecoderSpec& spec,
                    const cache::PageLayout& layout);

// `base`: what the plan is for, and compared with.
absl::StatusOr<std::string> PlanReportText(const kvasir::v1::KvPlan& plan,
                                           const model::Checkpoint& base);
absl::StatusOr<nlohmann::ordered_json> PlanReportJson(
    const kvasir::v1::KvPlan& plan, const model::Checkpoint& base);

}  // namespace kvasir::cli
