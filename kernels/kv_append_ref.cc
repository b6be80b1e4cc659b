#include "kernels/kv_append.h"
#include "kernels/stream.h"

namespace kvasir::kernels {
namespace {

void Append(const KvSideView& view, const float* rows, int64_t row_stride,
            const KvAppendParams& params) {
  VisitDType(view.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t t = 0; t < params.num_tokens; ++t) {
      const int64_t slot = params.slots[t];
      if (slot < 0) continue;
      for (int64_t g = 0; g < view.num_groups; ++g) {
        const float* from = rows + t * row_stride + g * view.width;
        T* to = reinterpret_cast<T*>(SlotAddress(
            view, slot / params.page_tokens, g, slot % params.page_tokens));
        for (int64_t i = 0; i < view.width; ++i) to[i] = FromFloat<T>(from[i]);
      }
    }
  });
}

}  // namespace

void KvAppendReference(const KvAppendParams& params, CpuStream&) {
  Append(params.key_view, params.key, params.key_row_stride, params);
  Append(params.value_view, params.value, params.value_row_stride, params);
}

}  // namespace kvasir::kernels
