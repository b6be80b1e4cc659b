// How a device wants a model's matrices.
#pragma once

#include "kernels/device/device.h"

namespace kvasir::worker {

struct MatrixFormat {
  kernels::WeightLayout layout = kernels::WeightLayout::kPanels32;
  kernels::DType activations = kernels::DType::kF32;

  static MatrixFormat Of(const kernels::Device& device) {
    return {device.weight_layout(), device.activations()};
  }
  // The type of a matrix that is stored in `stored`. A GPU's tensor cores take
  // activations and weights of one 16-bit type only, so there it is theirs;
  // elsewhere numbers stay as they are.
  kernels::DType TypeFor(kernels::DType stored) const {
    return layout == kernels::WeightLayout::kRows &&
                   activations != kernels::DType::kF32
               ? activations
               : stored;
  }
};

}  // namespace kvasir::worker
