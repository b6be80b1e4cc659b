#include "kernels/sampling/sample.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/sampling/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<SampleParams, DevicePtr<void>> kSample = {
    "sample", &SampleReference, &SampleSimd};
constexpr OpKernels<CountTokensParams> kCountTokens = {
    "count_tokens", &CountTokensReference, &CountTokensReference};

}  // namespace

absl::Status Sample(Stream& stream, const SampleParams& params,
                    Workspace& workspace) {
  if (params.num_rows < 0) {
    return Refuse(kSample.op, "rows", 0, params.num_rows);
  }
  if (params.vocab < 1) return Refuse(kSample.op, "vocab", 1, params.vocab);
  if (params.max_top < 0 || params.max_top > params.vocab) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sample: max_top must be from 0 to the size of the vocabulary, ",
        params.vocab, ", but is ", params.max_top));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckDeviceLogits(kSample.op, stream.device(), params.vocab));
  Workspace::Scope scope(&workspace);
  // On a CPU, each thread reuses its scratch for every row. On a GPU, every row
  // has its own scratch, because all rows are computed at the same time.
  const DevicePtr<char> scratch = workspace.Take<char>(
      stream.device() == DeviceKind::kCpu
          ? SampleScratchBytes(params.vocab, ScratchThreads(stream))
          : SampleDeviceRowBytes(params.vocab, params.max_top) *
                std::max<int64_t>(params.num_rows, 1));
  if (workspace.counting()) return CheckServed(kSample, stream);
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kSample, stream, params, scratch);
}

absl::Status CountTokens(Stream& stream, const CountTokensParams& params,
                         Workspace& workspace) {
  if (params.num_rows < 0) {
    return Refuse(kCountTokens.op, "rows", 0, params.num_rows);
  }
  if (params.vocab < 1) {
    return Refuse(kCountTokens.op, "vocab", 1, params.vocab);
  }
  if (workspace.counting()) return CheckServed(kCountTokens, stream);
  return Launch(kCountTokens, stream, params);
}

}  // namespace kvasir::kernels
