// Reading, writing and judging compression plans (kvasir.v1.KvPlan, the
// kv_plan.json of a checkpoint). A checkpoint without a plan gets FullRankPlan:
// there is one cache path, and the plan drives it.
//
// Errors: INVALID_ARGUMENT for a plan that has no meaning, UNIMPLEMENTED for
// one that has a meaning which this build does not serve. The text names layer,
// side ("key"/"value"), part, want and have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

// The only plan schema so far.
inline constexpr uint32_t kPlanSchemaVersion = 1;

// Largest plan text that is read: 128 layers whose every head lists its pairs
// take well under a tenth of it.
inline constexpr int64_t kMaxPlanJsonBytes = 16 * 1024 * 1024;

enum class Side { kKey, kValue };
// "key" or "value".
absl::string_view SideName(Side side);

// Bytes of one number; 0 for DATA_TYPE_UNSPECIFIED.
int64_t DataTypeBytes(kvasir::v1::DataType dtype);
// "f32", "f16", "bf16" and back; INVALID_ARGUMENT lists what there is.
absl::string_view DataTypeName(kvasir::v1::DataType dtype);
absl::StatusOr<kvasir::v1::DataType> ParseDataType(absl::string_view name);

// Whole keys (after RoPE where the layer has one) and whole values of every
// layer, stored as `dtype`.
kvasir::v1::KvPlan FullRankPlan(const AttentionShape& shape,
                                kvasir::v1::DataType dtype);

// Parses a plan's JSON form. Unknown fields, another schema version and text
// over kMaxPlanJsonBytes are INVALID_ARGUMENT; `name` (a file's path) starts
// the error's text. The plan is not judged: see ValidatePlan.
absl::StatusOr<kvasir::v1::KvPlan> ParsePlanJson(absl::string_view text,
                                                 absl::string_view name);

// The JSON form, indented, ending in a newline. ParsePlanJson reads it back to
// an equal plan.
std::string PlanToJson(const kvasir::v1::KvPlan& plan);

// Whether the plan has a meaning for a model of this shape: counts, ranks no
// greater than the space allows, heads partitioned exactly, known bit widths,
// and no combination that contradicts itself.
absl::Status ValidatePlan(const kvasir::v1::KvPlan& plan,
                          const AttentionShape& shape);

// What is kept exact beside the codes; none: as the plan has it.
struct ExactTokens {
  std::optional<uint32_t> sinks;   // first tokens of a sequence
  std::optional<uint32_t> window;  // tokens nearest to the query
};
// For every side that stores codes. False if there is none: all stays.
bool SetExactTokens(const ExactTokens& exact, kvasir::v1::KvPlan* plan);

// Sinks and an exact window that no sequence of `tokens` fills keep all of it
// exact: together they become that length, for their rows are held for every
// sequence.
void ClampExactRows(int64_t tokens, kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
