#include "worker/service/convert.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "proto/refusal.h"

namespace kvasir::worker {
namespace {

// Copies the token ids, because the message is freed when its call ends.
absl::StatusOr<proto::TokenBytes> ToTokens(absl::string_view field,
                                           const std::string& bytes) {
  absl::StatusOr<proto::TokenBytes> tokens =
      proto::TokenBytes::FromBytes(bytes);
  if (tokens.ok()) return tokens;
  return absl::Status(tokens.status().code(),
                      absl::StrCat(field, ": ", tokens.status().message()));
}

}  // namespace

absl::StatusOr<Request> ToRequest(const kvasir::v1::GenerateRequest& from,
                                  absl::Time deadline) {
  Request to;
  to.request_id = from.request_id();
  to.attempt = from.attempt();
  to.tenant = from.tenant();
  to.cache_salt = from.cache_salt();
  KVASIR_ASSIGN_OR_RETURN(
      to.prompt, ToTokens("prompt_token_ids", from.prompt_token_ids()));
  KVASIR_ASSIGN_OR_RETURN(
      to.emitted, ToTokens("emitted_token_ids", from.emitted_token_ids()));
  to.sampling = from.sampling();
  if (from.has_eviction_budget()) {
    to.eviction_budget = {.tokens = from.eviction_budget().slots(),
                          .ratio = from.eviction_budget().share()};
  }
  to.priority = from.priority();
  to.deadline = deadline;
  to.queue_timeout = absl::Milliseconds(from.queue_timeout_ms());
  return to;
}

kvasir::v1::LoadReport ToLoadReport(const LoadSnapshot& from) {
  kvasir::v1::LoadReport to;
  to.set_step(from.step);
  to.set_running(from.running);
  to.set_waiting(from.waiting);
  to.set_free_pages(from.free_pages);
  to.set_total_pages(from.total_pages);
  to.set_draining(from.draining);
  to.set_queued_tokens(from.queued_tokens);
  to.set_step_limit_ms(from.step_limit_ms);
  return to;
}

absl::Status ToStatus(const Refusal& refusal) {
  absl::Status status = refusal.status;
  if (!status.ok() &&
      refusal.reason != kvasir::v1::Refusal::REFUSAL_UNSPECIFIED) {
    kvasir::v1::Refusal payload;
    payload.set_reason(refusal.reason);
    payload.set_detail(std::string(refusal.status.message()));
    proto::SetRefusal(payload, &status);
  }
  return status;
}

}  // namespace kvasir::worker
