// silu_mul: the gate of a gated MLP. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, F + i], silu(g) = g/(1+exp(-g)).
struct SiluMulParams {
  const float* gate_up = nullptr;  // [T, 2F]
  float* out = nullptr;            // [T, F]
  int64_t num_rows = 0;            // T
  int64_t features = 0;            // F
};

class CpuStream;
void SiluMulReference(const SiluMulParams& params, CpuStream& stream);
void SiluMulSimd(const SiluMulParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
