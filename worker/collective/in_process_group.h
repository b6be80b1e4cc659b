// A tensor-parallel group whose ranks are threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/collective/collective.h"

namespace kvasir::worker {

// Makes one Collective for each rank, for CPU streams. Calls wait for other
// ranks without a time limit, because a thread of this process cannot disappear
// as another process can.
//
// Owns: nothing. The returned collectives share the group's state, and the last
//   of them frees it. Callers own the data that they pass to calls.
class InProcessGroup {
 public:
  static std::vector<std::unique_ptr<Collective>> Create(int64_t size);
};

}  // namespace kvasir::worker
