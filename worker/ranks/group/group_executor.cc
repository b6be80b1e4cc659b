#include "worker/ranks/group/group_executor.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::worker {

absl::Status GroupExecutor::Send(const kvasir::v1::StepPlan& plan) {
  if (const absl::Status status = leader_.SendStep(plan); !status.ok()) {
    return leader_.FailStep(status);
  }
  sent_id_ = plan.step_id();
  return absl::OkStatus();
}

absl::Status GroupExecutor::Announce(const kvasir::v1::StepPlan& plan) {
  return Send(plan);
}

absl::Status GroupExecutor::Enqueue(const kvasir::v1::StepPlan& plan) {
  step_id_ = plan.step_id();
  if (sent_id_ != step_id_) KVASIR_RETURN_IF_ERROR(Send(plan));
  if (const absl::Status status = own_.Enqueue(plan); !status.ok()) {
    return leader_.FailStep(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<kvasir::v1::StepResult> GroupExecutor::Await() {
  absl::StatusOr<kvasir::v1::StepResult> result = own_.Await();
  if (!result.ok()) return leader_.FailStep(result.status());
  if (result->step_id() != step_id_) {
    return leader_.FailStep(absl::InternalError(
        absl::StrCat("the executor returned the result of step ",
                     result->step_id(), ", expected step ", step_id_)));
  }
  KVASIR_RETURN_IF_ERROR(leader_.FinishStep(*result));
  return result;
}

}  // namespace kvasir::worker
