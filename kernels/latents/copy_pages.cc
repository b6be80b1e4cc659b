#include "kernels/latents/copy_pages.h"

#include <cstring>

#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<CopyPagesParams> kKernels = {
    "copy_pages", &CopyPagesReference, &CopyPagesReference};

}  // namespace

void CopyPagesReference(const CopyPagesArgs& params, CpuStream&) {
  const char* from = static_cast<const char*>(params.from);
  char* to = static_cast<char*>(params.to);
  for (int64_t i = 0; i < params.num_pairs; ++i) {
    const PagePair pair = params.pairs[i];
    if (pair.from < 0) continue;
    std::memcpy(to + pair.to * params.page_bytes,
                from + pair.from * params.page_bytes,
                static_cast<size_t>(params.page_bytes));
  }
}

absl::Status CopyPages(Stream& stream, const CopyPagesParams& params,
                       Workspace& workspace) {
  if (params.page_bytes < 1) {
    return Refuse(kKernels.op, "page_bytes", 1, params.page_bytes);
  }
  if (params.num_pairs < 0) {
    return Refuse(kKernels.op, "pairs", 0, params.num_pairs);
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  return Launch(kKernels, stream, params);
}

}  // namespace kvasir::kernels
