// A tensor-parallel group whose ranks are threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/collective/collective.h"

namespace kvasir::worker {

// Makes one Collective per rank, for CPU streams. Calls wait for other ranks
// without a time limit, because threads of one process end together.
//
// Owns: state that all the returned collectives share, but none of the data
//   that ranks pass to calls.
class InProcessGroup {
 public:
  static std::vector<std::unique_ptr<Collective>> Create(int64_t size);
};

}  // namespace kvasir::worker
