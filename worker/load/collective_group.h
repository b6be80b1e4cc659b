// One rank's end of a collective, by its name, on its way into the group.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "worker/collective/collective.h"

namespace kvasir::cli {

struct CollectiveOptions {
  plan::TpShard shard;
  std::string kind;  // "gloo" or "nccl"
  // Empty: all ranks are on this host.
  std::string interface;
  std::string nccl_library;  // empty: the system's
  bool deterministic = false;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  // worker::NcclOptions'. Gloo's calls fail themselves.
  std::function<absl::Status()> use_device;
  std::function<void(const absl::Status&)> on_failure;
};

// Owns: what listens, until it is connected.
// Threads: one; Abort from any.
class CollectiveGroup {
 public:
  virtual ~CollectiveGroup() = default;

  // The errors of GlooGroup and NcclGroup.
  static absl::StatusOr<std::unique_ptr<CollectiveGroup>> Begin(
      const CollectiveOptions& options);

  // Who knows those of all ranks passes for one.
  virtual const std::string& address() const = 0;
  // Once; of all ranks, in their order.
  virtual absl::StatusOr<std::unique_ptr<worker::Collective>> Connect(
      absl::Span<const std::string> addresses) = 0;
  // Connect ends with this; over NCCL it waits out its time.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace kvasir::cli
