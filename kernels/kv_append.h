// kv_append: writes new tokens' keys and values into their slots. C++17.
#pragma once

#include <cstdint>

#include "kernels/kv_view.h"

namespace kvasir::kernels {

// Token t goes to page slots[t] / P, slot slots[t] % P, rounded to the side's
// dtype (nearest, ties to even). A negative slot is skipped. No two tokens of
// one launch have the same slot.
struct KvAppendParams {
  const float* key = nullptr;  // [T, Gk, key.width], rows key_row_stride apart
  const float* value = nullptr;  // [T, Gv, value.width]
  int64_t key_row_stride = 0;    // in elements
  int64_t value_row_stride = 0;
  const int64_t* slots = nullptr;  // [T]: page * P + slot in the page
  int64_t num_tokens = 0;          // T
  int64_t page_tokens = 0;         // P
  KvSideView key_view;
  KvSideView value_view;
};

class CpuStream;
void KvAppendReference(const KvAppendParams& params, CpuStream& stream);
void KvAppendSimd(const KvAppendParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
