// Ranks that are threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/collective/collective.h"

namespace kvasir::worker {

// Collectives on CPU streams. Waits have no time limit, because threads of one
// process end together.
//
// Owns: nothing of the ranks' memory. The returned ends share the group.
class InProcessGroup {
 public:
  static std::vector<std::unique_ptr<Collective>> Create(int64_t size);
};

}  // namespace kvasir::worker
