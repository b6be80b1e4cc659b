// A tensor-parallel group of CPU processes that communicate through Gloo.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/collective/collective.h"
#include "worker/ranks/gloo/gloo_mesh.h"

namespace kvasir::worker {

// One rank of a group that is not connected yet. Ranks exchange their addresses
// by other means, then all of them connect:
//
//   KVASIR_ASSIGN_OR_RETURN(auto group, GlooGroup::Begin(options));
//   ... exchange group->address() ...
//   KVASIR_ASSIGN_OR_RETURN(auto collective, group->Connect(addresses));
//
// For a sum, each rank sends its data to all others, a chunk at a time, and
// adds the data of all ranks in rank order, so that sums are deterministic.
//
// Owns, together with its collective: sockets, two threads, and memory for
//   messages (GlooOptions::chunk_bytes). A child process would inherit the
//   sockets, so a process that has a group must not start child processes.
// Errors: those of GlooMesh's methods of the same names.
class GlooGroup {
 public:
  static absl::StatusOr<std::unique_ptr<GlooGroup>> Begin(
      const GlooOptions& options);

  // One line of printable ASCII. It is a secret: a process that knows the
  // addresses of all ranks can pose as a rank.
  const std::string& address() const { return mesh_->address(); }

  // Call it once, on all ranks at about the same time, with the addresses of
  // all ranks in rank order.
  absl::StatusOr<std::unique_ptr<Collective>> Connect(
      absl::Span<const std::string> addresses);

  // Ends a running Connect, and aborts the collective that Connect returned.
  // May be called from any thread.
  void Abort(const absl::Status& reason) { mesh_->Abort(reason); }

 private:
  explicit GlooGroup(std::shared_ptr<GlooMesh> mesh);

  // Shared with the collective that Connect returns.
  const std::shared_ptr<GlooMesh> mesh_;
};

}  // namespace kvasir::worker
