#include "kernels/device/stream.h"
#include "kernels/rowwise/silu_mul.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {

void SiluMulReference(const SiluMulArgs& params, CpuStream&) {
  const int64_t features = params.features;
  for (int64_t t = 0; t < params.num_rows; ++t) {
    const float* gate = params.gate_up + t * 2 * features;
    const float* up = gate + features;
    float* out = params.out + t * features;
    const auto function = params.gate == GateKind::kSilu ? &Silu : &GeluTanh;
    for (int64_t i = 0; i < features; ++i) out[i] = function(gate[i]) * up[i];
  }
}

}  // namespace kvasir::kernels
