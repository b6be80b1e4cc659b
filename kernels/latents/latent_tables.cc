#include "kernels/latents/latent_tables.h"

#include <vector>

#include "base/status_macros.h"

namespace kvasir::kernels {

absl::StatusOr<LatentPart> AddLatentTables(LatentPart part,
                                           DeviceTables* tables) {
  std::vector<LatentGroup> groups(part.groups, part.groups + part.num_groups);
  std::vector<CodeRun> runs;
  for (const LatentGroup& group : groups) {
    runs.insert(runs.end(), group.runs, group.runs + group.num_runs);
  }
  KVASIR_ASSIGN_OR_RETURN(DevicePtr<const CodeRun> next,
                          tables->Add<CodeRun>(runs));
  for (LatentGroup& group : groups) {
    group.runs = next.device_address();
    next = next + group.num_runs;
  }
  KVASIR_ASSIGN_OR_RETURN(const DevicePtr<const LatentGroup> moved,
                          tables->Add<LatentGroup>(groups));
  part.groups = moved.device_address();
  return part;
}

}  // namespace kvasir::kernels
