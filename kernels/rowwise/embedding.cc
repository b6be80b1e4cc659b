#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<EmbeddingParams> kKernels = {
    "embedding", &EmbeddingReference, &EmbeddingSimd};

}  // namespace

absl::Status Embedding(Stream& stream, const EmbeddingParams& params,
                       Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, stream.device(), params.dtype));
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.vocab < 0) return Refuse(kKernels.op, "vocab", 0, params.vocab);
  if (params.hidden < 1) return Refuse(kKernels.op, "hidden", 1, params.hidden);
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (params.table == nullptr &&
      (params.packed.n != params.vocab || params.packed.k != params.hidden)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "embedding: the shape of the packed table is [", params.packed.n, ", ",
        params.packed.k, "], but must be [vocab, hidden] = [", params.vocab,
        ", ", params.hidden, "]"));
  }
  const auto layout = stream.device() == DeviceKind::kCpu
                          ? WeightLayout::kPanels32
                          : WeightLayout::kRows;
  if (params.table == nullptr && params.packed.layout != layout) {
    return absl::InvalidArgumentError(
        "embedding: the packed table has the weight layout of another kind of "
        "device; pack it for this device");
  }
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
