#include "kernels/paged_attention.h"

namespace kvasir::kernels {

int64_t PagedAttentionScratch(const PagedAttentionParams&, int) { return 16; }

void PagedAttentionSimd(const PagedAttentionParams& params, float* scratch,
                        CpuStream& stream) {
  PagedAttentionReference(params, scratch, stream);
}

}  // namespace kvasir::kernels
