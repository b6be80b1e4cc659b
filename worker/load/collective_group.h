// One rank's end of a collective while the group connects, for Gloo or NCCL.
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
  std::string nccl_library;  // empty: the system's library
  bool deterministic = false;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  // NcclOptions::use_device and on_failure. Gloo's calls return their failures.
  std::function<absl::Status()> use_device;
  std::function<void(const absl::Status&)> on_failure;
};

// Owns: the listening socket, until it is connected.
// Threads: one; Abort from any.
class CollectiveGroup {
 public:
  virtual ~CollectiveGroup() = default;

  // Errors: those of GlooGroup and NcclGroup.
  static absl::StatusOr<std::unique_ptr<CollectiveGroup>> Begin(
      const CollectiveOptions& options);

  // This rank's address. A process that knows the addresses of all ranks could
  // join as one, so they are secrets.
  virtual const std::string& address() const = 0;
  // Called once with the addresses of all ranks, in their order.
  virtual absl::StatusOr<std::unique_ptr<worker::Collective>> Connect(
      absl::Span<const std::string> addresses) = 0;
  // Makes Connect return `reason`; over NCCL only after its timeout.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace kvasir::cli
