// The memory layout of weights. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

enum class WeightLayout : uint8_t {
  kPanels32,  // panels of 32 columns (matmul.h), for the CPU
  kRows,      // rows [N, K] as in Hugging Face checkpoints, for GPUs
};

}  // namespace kvasir::kernels
