// The blocks and signs that the hadamard op reads, one set for all latents of
// a model.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kernels/latents/hadamard.h"

namespace kvasir::kernels {

// Owns: the blocks of every width that was asked for, and the signs of their
// kernels. Both stay where they are as long as the tables do.
// Threads: Of from one thread at a time; what it returned is read by any.
class HadamardTables {
 public:
  HadamardTables() = default;
  HadamardTables(const HadamardTables&) = delete;
  HadamardTables& operator=(const HadamardTables&) = delete;

  // Latents of `width` channels (at least 1) at `column`.
  HadamardLatent Of(int64_t width, int64_t column);

 private:
  struct Kernel {
    int64_t stride = 0;
    std::vector<float> columns;
    std::vector<float> rows;
  };
  HadamardBlock BlockOf(int64_t order);

  std::map<int64_t, std::vector<HadamardBlock>> blocks_;  // by width
  std::map<int64_t, Kernel> kernels_;                     // by their order
};

}  // namespace kvasir::kernels
