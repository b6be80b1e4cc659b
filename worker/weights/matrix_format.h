// The format in which a device expects a model's matrices.
#pragma once

#include "kernels/device/device.h"

namespace kvasir::worker {

struct MatrixFormat {
  kernels::WeightLayout layout = kernels::WeightLayout::kPanels32;
  kernels::DType activations = kernels::DType::kF32;

  static MatrixFormat Of(const kernels::Device& device) {
    return {device.weight_layout(), device.activations()};
  }
  // The type in which the device gets a matrix that is stored as `stored`. On a
  // GPU with 16-bit activations it is the type of activations, because tensor
  // cores need both operands in the same type. Otherwise the matrix keeps its
  // type.
  kernels::DType TypeFor(kernels::DType stored) const {
    return layout == kernels::WeightLayout::kRows &&
                   activations != kernels::DType::kF32
               ? activations
               : stored;
  }
};

}  // namespace kvasir::worker
