// Activation functions of scalar_math.h, with the device's exponential. C++17.
#pragma once

#include "kernels/simd/scalar_math.h"
#include "kernels/simt/numbers.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// Returns x / (1 + exp(-x)), or 0 if the exponential overflows, as on the CPU.
KVASIR_DEVICE float Silu(float x) {
  if (x < -exp_constants::kHighest) return 0.0f;
  return x / (1.0f + Exp2(-x * kLog2E));
}

KVASIR_DEVICE float GeluTanh(float x) {
  namespace c = gelu_constants;
  const float twice = x * Fma(x * x, c::kCubic, c::kLinear);
  if (twice < -exp_constants::kHighest) return 0.0f;
  return x / (1.0f + Exp2(-twice * kLog2E));
}

// Returns cap * tanh(x / cap). If `power` overflows, the quotient is 0.
KVASIR_DEVICE float SoftCap(float x, float cap) {
  const float power = Exp2(x * (2.0f / cap * kLog2E));
  return cap - 2.0f * cap / (1.0f + power);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
