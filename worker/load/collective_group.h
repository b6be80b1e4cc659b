// Connects a rank with the other ranks of its group, over Gloo or NCCL. The
// result is the rank's Collective.
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
  // The network interface to use. Empty if all ranks are on this host.
  std::string interface;
  std::string nccl_library;  // a path; empty: the installed library
  bool deterministic = false;
  absl::Duration connect_timeout = absl::Seconds(60);
  absl::Duration call_timeout = absl::Seconds(30);
  // The members of NcclOptions with the same names. Gloo uses neither.
  std::function<absl::Status()> use_device;
  std::function<void(const absl::Status&)> on_failure;
};

// Connects one rank to the other ranks of its group.
//
// Owns: the listening socket, until the group is connected.
// Threads: one at a time, but any thread may call Abort.
class CollectiveGroup {
 public:
  virtual ~CollectiveGroup() = default;

  // Errors: those of GlooGroup and NcclGroup.
  static absl::StatusOr<std::unique_ptr<CollectiveGroup>> Begin(
      const CollectiveOptions& options);

  // This rank's address. It is a secret, because a process that knows the
  // addresses of all ranks could join the group in place of a rank.
  virtual const std::string& address() const = 0;
  // Connects to the other ranks. Call it once, with the addresses of all ranks
  // in rank order.
  virtual absl::StatusOr<std::unique_ptr<worker::Collective>> Connect(
      absl::Span<const std::string> addresses) = 0;
  // Makes a running Connect return the error `reason`. Over NCCL it has no
  // effect: Connect returns after its timeout.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace kvasir::cli
