// Reading, writing and judging compression plans (kvasir.v1.KvPlan, the
// kv_plan.json of a checkpoint). A checkpoint without a plan gets FullRankPlan:
// there is one cache path, and the plan drives it.
//
// Errors: INVALID_ARGUMENT for a plan that has no meaning, UNIMPLEMENTED for a
//   plan that has a meaning but is not served by this build. The text names
//   layer, side ("key"/"value"), part, the value found and the value wanted.
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

// The largest plan text that is read. A plan of 128 layers whose heads all list
// their pairs takes well under a tenth of it.
inline constexpr int64_t kMaxPlanJsonBytes = 16 * 1024 * 1024;

enum class Side { kKey, kValue };
// "key" or "value".
absl::string_view SideName(Side side);

// Bytes of one number; 0 for DATA_TYPE_UNSPECIFIED.
int64_t DataTypeBytes(kvasir::v1::DataType dtype);
// "f32", "f16", "bf16", and the reverse; INVALID_ARGUMENT lists the names.
absl::string_view DataTypeName(kvasir::v1::DataType dtype);
absl::StatusOr<kvasir::v1::DataType> ParseDataType(absl::string_view name);

// Whole keys and whole values of every layer, stored as `dtype`. Keys are
// stored after RoPE if the layer rotates.
kvasir::v1::KvPlan FullRankPlan(const AttentionShape& shape,
                                kvasir::v1::DataType dtype);

// Parses a plan's JSON form. INVALID_ARGUMENT for unknown fields, another
// schema version, and text longer than kMaxPlanJsonBytes. `name` (a file's
// path) begins the error's text. The plan is not judged; call ValidatePlan.
absl::StatusOr<kvasir::v1::KvPlan> ParsePlanJson(absl::string_view text,
                                                 absl::string_view name);

// The JSON form, indented, with a newline at its end. ParsePlanJson reads it
// back to an equal plan.
std::string PlanToJson(const kvasir::v1::KvPlan& plan);

// Checks that the plan has a meaning for a model of this shape: counts, ranks
// that the space allows, heads that are partitioned exactly, known bit widths,
// and no contradicting combination.
absl::Status ValidatePlan(const kvasir::v1::KvPlan& plan,
                          const AttentionShape& shape);

// Tokens that are also kept exact, in addition to their codes. Empty: as the
// plan has it.
struct ExactTokens {
  std::optional<uint32_t> sinks;   // first tokens of a sequence
  std::optional<uint32_t> window;  // tokens nearest to the query
};
// Sets them on every side that stores codes. Returns false, and changes
// nothing, if no side does.
bool SetExactTokens(const ExactTokens& exact, kvasir::v1::KvPlan* plan);

// Shortens sinks and exact window so that together they are at most `tokens`.
// No sequence is longer, and rows are allocated for every sequence.
void ClampExactRows(int64_t tokens, kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
