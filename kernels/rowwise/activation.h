// activation: applies the activation function of an MLP without a gate, or
// limits logits (kSoftCap). C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class ActivationKind {
  // x times the cumulative distribution function of the standard normal
  // distribution at x
  kGelu,
  kGeluTanh,  // kGelu approximated by tanh
  kRelu,      // max(x, 0)
  kSoftCap,   // cap * tanh(x / cap)
};

// out[t, i] = activation(x[t, i]), as scalar_math.h computes it.
template <template <typename> class Ptr>
struct ActivationParamsIn {
  Ptr<const float> x = nullptr;  // [T, F]
  Ptr<float> out = nullptr;      // [T, F], may be x
  int64_t num_rows = 0;          // T
  int64_t columns = 0;           // F
  ActivationKind kind = ActivationKind::kGelu;
  DType dtype = DType::kF32;  // the type of x and out
  float cap = 0.0f;           // above 0 for kSoftCap

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(x, out);
  }
};
using ActivationParams = ActivationParamsIn<DevicePtr>;
using ActivationArgs = ActivationParamsIn<LaunchPtr>;

class CpuStream;
void ActivationReference(const ActivationArgs& params, CpuStream& stream);
void ActivationSimd(const ActivationArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
