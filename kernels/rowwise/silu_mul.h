// silu_mul: the activation of a gated MLP. It multiplies the second half of
// each row by silu or gelu of the first half. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class GateKind {
  kSilu,      // silu(g) = g / (1 + exp(-g))
  kGeluTanh,  // the function of ActivationKind::kGeluTanh
};

// out[t, i] = gate(gate_up[t, i]) * gate_up[t, F + i], as scalar_math.h
// computes the gate.
template <template <typename> class Ptr>
struct SiluMulParamsIn {
  Ptr<const float> gate_up = nullptr;  // [T, 2F]
  Ptr<float> out = nullptr;            // [T, F]
  int64_t num_rows = 0;                // T
  int64_t features = 0;                // F
  DType dtype = DType::kF32;           // the type of activations
  GateKind gate = GateKind::kSilu;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(gate_up, out);
  }
};
using SiluMulParams = SiluMulParamsIn<DevicePtr>;
using SiluMulArgs = SiluMulParamsIn<LaunchPtr>;

class CpuStream;
void SiluMulReference(const SiluMulArgs& params, CpuStream& stream);
void SiluMulSimd(const SiluMulArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
