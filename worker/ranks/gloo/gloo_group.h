// A tensor-parallel group of processes on CPUs, over Gloo.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/collective/collective.h"
#include "worker/ranks/gloo/gloo_mesh.h"

namespace kvasir::worker {

// One rank on its way into a group. Ranks tell each other their addresses by
// other means, then all of them connect:
//
//   KVASIR_ASSIGN_OR_RETURN(auto group, GlooGroup::Begin(options));
//   ... exchange of group->address() ...
//   KVASIR_ASSIGN_OR_RETURN(auto collective, group->Connect(addresses));
//
// The collective sums in rank order, as deterministic runs want it: each rank
// sends its numbers to all others, a chunk at a time.
//
// Owns, with its collective: sockets, two threads, and memory that is bounded
//   by the options.
//   Descriptors are inherited by children: a process starts none while it has
//   a group.
// Errors: those of GlooMesh's methods of the same names.
class GlooGroup {
 public:
  static absl::StatusOr<std::unique_ptr<GlooGroup>> Begin(
      const GlooOptions& options);

  // A line of printable ASCII. Who knows those of all ranks passes for one.
  const std::string& address() const { return mesh_->address(); }

  // Once. Addresses of all ranks, in their order; on all ranks at about the
  // same time.
  absl::StatusOr<std::unique_ptr<Collective>> Connect(
      absl::Span<const std::string> addresses);

  // Connect, wherever it is, ends with this; from any thread. What Connect has
  // returned is aborted, too.
  void Abort(const absl::Status& reason) { mesh_->Abort(reason); }

 private:
  explicit GlooGroup(std::shared_ptr<GlooMesh> mesh);

  // The collective's, too.
  const std::shared_ptr<GlooMesh> mesh_;
};

}  // namespace kvasir::worker
