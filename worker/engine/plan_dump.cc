#include "worker/engine/plan_dump.h"

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

std::string DumpPlan(const kvasir::v1::StepPlan& plan) {
  std::string out =
      absl::StrCat("step ", plan.step_id(), ": ", plan.sequences_size(),
                   " sequences, ", plan.released_sequences_size(),
                   " released, ", plan.page_copies_size(), " page copies\n");
  for (const auto& eviction : plan.evictions()) {
    absl::StrAppend(&out, "  sequence ", eviction.sequence_id(), " at ",
                    eviction.logical_tokens(), ", group ",
                    eviction.page_group(), ": keeps ", eviction.kept_slots(),
                    " of ", eviction.num_slots(), " slots\n");
  }
  for (const auto& step : plan.sequences()) {
    absl::StrAppend(&out, "  sequence ", step.sequence_id(), ": ",
                    step.num_tokens(), " tokens at ", step.logical_start(),
                    step.input_is_last_sampled() ? " (last sampled)" : "",
                    step.has_sample() ? ", samples" : "");
    if (step.target_ids_size() > 0) {
      absl::StrAppend(&out, ", ", step.target_ids_size(), " targets");
    }
    for (const auto& delta : step.block_tables()) {
      absl::StrAppend(&out, ", group ", delta.page_group(), ": ",
                      delta.reset() ? "reset, " : "", "+",
                      delta.appended_pages_size(), " pages, live from ",
                      delta.first_live_index());
    }
    out.push_back('\n');
  }
  return out;
}

}  // namespace kvasir::worker
