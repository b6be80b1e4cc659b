// activation: what stands between the two matrices of a plain MLP. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

enum class ActivationKind {
  kGelu,      // x times the normal distribution function at x (exact, by erf)
  kGeluTanh,  // the same with a tanh in its place
  kRelu,      // 0 below 0
};

// out[t, i] = activation(x[t, i]), as scalar_math.h computes it.
struct ActivationParams {
  const float* x = nullptr;  // [T, F]
  float* out = nullptr;      // [T, F], may be x
  int64_t num_rows = 0;      // T
  int64_t columns = 0;       // F
  ActivationKind kind = ActivationKind::kGelu;
};

class CpuStream;
void ActivationReference(const ActivationParams& params, CpuStream& stream);
void ActivationSimd(const ActivationParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
