// The format in which a device takes a model's matrices.
#pragma once

#include "kernels/device/device.h"

namespace kvasir::worker {

struct MatrixFormat {
  kernels::WeightLayout layout = kernels::WeightLayout::kPanels32;
  kernels::DType activations = kernels::DType::kF32;

  static MatrixFormat Of(const kernels::Device& device) {
    return {device.weight_layout(), device.activations()};
  }
  // The type of a matrix that is stored as `stored`. A GPU's tensor cores need
  // activations and weights of the same 16-bit type, so the matrix gets the
  // type of activations there. Elsewhere it keeps its type.
  kernels::DType TypeFor(kernels::DType stored) const {
    return layout == kernels::WeightLayout::kRows &&
                   activations != kernels::DType::kF32
               ? activations
               : stored;
  }
};

}  // namespace kvasir::worker
