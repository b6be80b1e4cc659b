#pragma once

#include <ATen/ATen.h>

#include <string>

namespace kvasir::compress {

// A parameter under its name in a Hugging Face checkpoint.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace kvasir::compress
