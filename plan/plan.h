// Reads, writes and validates compression plans (kvasir.v1.KvPlan, the
// kv_plan.json of a checkpoint). A checkpoint without a plan gets FullRankPlan,
// because all cache code is driven by a plan.
//
// Errors: INVALID_ARGUMENT for a plan that contradicts itself or does not fit
// the model. The text names the layer, the side ("key" or "value") and the
// part. It also states the value found and the values allowed.
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

// The only version of the plan schema so far.
inline constexpr uint32_t kPlanSchemaVersion = 1;

// The largest plan text that is read. A plan of 128 layers whose heads all list
// their pairs takes well under a tenth of it.
inline constexpr int64_t kMaxPlanJsonBytes = 16 * 1024 * 1024;

enum class Side { kKey, kValue };
// Returns "key" or "value".
absl::string_view SideName(Side side);

// The size of one number in bytes; 0 for DATA_TYPE_UNSPECIFIED.
int64_t DataTypeBytes(kvasir::v1::DataType dtype);
// These functions convert between number types and their names: "f32",
// "f16" and "bf16". INVALID_ARGUMENT for another name; the error lists the
// three names.
absl::string_view DataTypeName(kvasir::v1::DataType dtype);
absl::StatusOr<kvasir::v1::DataType> ParseDataType(absl::string_view name);

// A plan without compression: all layers store full-rank, unquantized keys and
// values as `dtype`. Keys are stored after RoPE if the layer rotates them.
kvasir::v1::KvPlan FullRankPlan(const AttentionShape& shape,
                                kvasir::v1::DataType dtype);

// Parses a plan's JSON form. INVALID_ARGUMENT for unknown fields, another
// schema version, and text longer than kMaxPlanJsonBytes. Errors begin with
// `name`, the path of the file. The plan is not validated; call ValidatePlan.
absl::StatusOr<kvasir::v1::KvPlan> ParsePlanJson(absl::string_view text,
                                                 absl::string_view name);

// Returns the plan as indented JSON that ends with a newline. ParsePlanJson
// makes an equal plan from it.
std::string PlanToJson(const kvasir::v1::KvPlan& plan);

// Checks that the plan is valid for a model of this shape: for example
// that groups partition the heads exactly, and that no settings contradict
// each other.
absl::Status ValidatePlan(const kvasir::v1::KvPlan& plan,
                          const AttentionShape& shape);

// The numbers of tokens that are also stored exactly, in addition to their
// codes. If a field has no value, SetExactTokens does not change that number in
// the plan.
struct ExactTokens {
  std::optional<uint32_t> sinks;   // the first tokens of a sequence
  std::optional<uint32_t> window;  // the tokens nearest to the query
};
// Sets the exact tokens of every side that stores codes. Returns false and
// changes nothing if no side stores codes.
bool SetExactTokens(const ExactTokens& exact, kvasir::v1::KvPlan* plan);

// Reduces the numbers of exact sinks and of exact window tokens so that their
// sum is at most `tokens`, the greatest length of a sequence. This saves
// memory, because every sequence allocates a row for each of these tokens.
void ClampExactRows(int64_t tokens, kvasir::v1::KvPlan* plan);

}  // namespace kvasir::plan
