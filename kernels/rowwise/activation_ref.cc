#include "kernels/device/stream.h"
#include "kernels/rowwise/activation.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

float Activate(ActivationKind kind, float cap, float x) {
  switch (kind) {
    case ActivationKind::kGelu:
      return Gelu(x);
    case ActivationKind::kGeluTanh:
      return GeluTanh(x);
    case ActivationKind::kSoftCap:
      return SoftCap(x, cap);
    case ActivationKind::kRelu:
      break;
  }
  return Relu(x);
}

}  // namespace

void ActivationReference(const ActivationArgs& params, CpuStream&) {
  const int64_t count = params.num_rows * params.columns;
  for (int64_t i = 0; i < count; ++i) {
    params.out[i] = Activate(params.kind, params.cap, params.x[i]);
  }
}

}  // namespace kvasir::kernels
