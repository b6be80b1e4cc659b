#include "worker/program/prompt_lift.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/params/paged_attention.h"

namespace kvasir::worker {
namespace {

// `widths` has, for each query head, the width of the latent that it reads.
std::optional<PromptLift> MakeLift(const PartProgram& part, int64_t dims,
                                   const std::vector<int64_t>& widths) {
  if (dims > kernels::kAttentionMaxHeadDim) return std::nullopt;
  // Both costs are in multiply-adds.
  int64_t saved_per_row = 0;
  for (const int64_t width : widths) saved_per_row += width - dims;
  if (saved_per_row <= 0) return std::nullopt;
  int64_t cost = 0;
  for (const int32_t group : part.group_of_head) {
    cost += part.latents[static_cast<size_t>(group)].width * dims;
  }
  PromptLift lift;
  lift.dims = dims;
  lift.from_rows = cost / saved_per_row + 1;
  if (lift.from_rows > kPromptLiftRows) return std::nullopt;
  return lift;
}

bool AllEqual(const std::vector<int64_t>& values) {
  return std::all_of(values.begin(), values.end(),
                     [&](int64_t value) { return value == values.front(); });
}

}  // namespace

void PlanPromptLifts(AttentionProgram* program) {
  for (KeyProgram& part : program->key) {
    // A prompt lift uses the queries as they are before any query lift, and
    // they must all have the same width.
    if (part.lift == QueryLift::kNone || part.rebuild.has_value() ||
        part.hadamard || !AllEqual(part.projected.width)) {
      continue;
    }
    part.prompt_lift =
        MakeLift(part, part.projected.width.front(), part.query.width);
  }
  ValueProgram& value = program->value;
  if (!value.lifted || value.hadamard) return;
  value.prompt_lift = MakeLift(value, program->head_dim, value.attended.width);
}

bool LiftsPrompts(const AttentionProgram& program) {
  return program.value.prompt_lift.has_value() ||
         std::any_of(program.key.begin(), program.key.end(),
                     [](const KeyProgram& part) {
                       return part.prompt_lift.has_value();
                     });
}

std::string InvarianceName(bool lifts_prompts, bool rows_are_invariant) {
  if (!rows_are_invariant) return "rounding";
  return lifts_prompts ? "bits but for reused output" : "bits";
}

}  // namespace kvasir::worker
