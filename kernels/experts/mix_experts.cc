#include "kernels/experts/mix_experts.h"

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/parallel.h"
#include "kernels/experts/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<MixExpertsParams> kKernels = {
    "mix_experts", &MixExpertsReference, &MixExpertsCpu};

void MixTokens(const MixExpertsArgs& params, int64_t begin, int64_t end) {
  const int64_t columns = params.columns;
  for (int64_t t = begin; t < end; ++t) {
    float* const out = params.out + t * columns;
    for (int64_t j = 0; j < params.top_k; ++j) {
      const float weight = params.weights[t * params.top_k + j];
      const float* const y =
          params.y + params.places[t * params.top_k + j] * columns;
      if (j == 0) {
        for (int64_t i = 0; i < columns; ++i) out[i] = weight * y[i];
      } else {
        for (int64_t i = 0; i < columns; ++i) out[i] = out[i] + weight * y[i];
      }
    }
  }
}

}  // namespace

absl::Status MixExperts(Stream& stream, const MixExpertsParams& params,
                        Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.top_k < 1) return Refuse(kKernels.op, "top_k", 1, params.top_k);
  if (params.columns < 0) {
    return Refuse(kKernels.op, "columns", 0, params.columns);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

void MixExpertsReference(const MixExpertsArgs& params, CpuStream&) {
  MixTokens(params, 0, params.num_tokens);
}

void MixExpertsCpu(const MixExpertsArgs& params, CpuStream& stream) {
  ForRows(stream, params.num_tokens, params.top_k * params.columns,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            MixTokens(params, begin, end);
          });
}

}  // namespace kvasir::kernels
