#include "router/core/access_log.h"

#include <optional>

#include "base/log.h"

namespace kvasir::router {
namespace {

// Returns -1 for an infinite duration, which stands for an event that did
// not happen.
double Milliseconds(absl::Duration duration) {
  return duration == absl::InfiniteDuration()
             ? -1.0
             : absl::ToDoubleMilliseconds(duration);
}

}  // namespace

void LogAccess::Write(const AccessRecord& record) {
  if (absl::IsUnauthenticated(record.status) && record.tenant.empty() &&
      !record.reason.empty()) {
    const std::optional<uint64_t> unlogged = strangers_.Take(record.reason);
    if (!unlogged.has_value()) return;
    base::LogInfo("unknown caller refused",
                  {{"facade", record.facade},
                   {"peer", record.peer},
                   {"reason", record.reason},
                   {"status", absl::StatusCodeToString(record.status.code())},
                   {"since_last_line", *unlogged}});
    return;
  }
  base::LogInfo("request",
                {{"request_id", record.request_id},
                 {"client_request_id", record.client_request_id},
                 {"facade", record.facade},
                 {"peer", record.peer},
                 {"tenant", record.tenant},
                 {"caller", record.caller},
                 {"model", record.model},
                 {"replica", record.replica},
                 {"prompt_tokens", record.prompt_tokens},
                 {"output_tokens", record.output_tokens},
                 {"cached_tokens", record.cached_tokens},
                 {"samples", record.samples},
                 {"attempts", record.attempts},
                 {"queue_ms", Milliseconds(record.queue)},
                 {"ttft_ms", Milliseconds(record.time_to_first_token)},
                 {"duration_ms", Milliseconds(record.duration)},
                 {"finish_reason", record.finish_reason},
                 {"status", absl::StatusCodeToString(record.status.code())},
                 {"reason", record.reason},
                 {"traceparent", record.traceparent}});
}

}  // namespace kvasir::router
