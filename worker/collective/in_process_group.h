// Ranks as threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/collective/collective.h"

namespace kvasir::worker {

// On CPU streams. Nobody is waited for with a limit: threads of one process end
// together.
// Owns: nothing of the ranks' memory; hands out ends that share the group.
class InProcessGroup {
 public:
  static std::vector<std::unique_ptr<Collective>> Create(int64_t size);
};

}  // namespace kvasir::worker
