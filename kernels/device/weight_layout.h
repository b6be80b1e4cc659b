// How the weights of products lie. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

enum class WeightLayout : uint8_t {
  kPanels32,  // panels of 32 columns (matmul.h): the CPU's
  kRows,      // Hugging Face's rows [N, K]: a GPU's
};

}  // namespace kvasir::kernels
