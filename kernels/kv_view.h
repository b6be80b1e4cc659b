// How the cache's pages look to kernels: one side (keys or values) of one
// layer. C++17.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace kvasir::kernels {

// The number `i` of slot `s` (0 .. P-1) of group `g` in page `p` is at byte
//   p * page_bytes + group_offset_bytes[g] + s * slot_stride_bytes
//     + i * DTypeBytes(dtype)
// of the arena; all of these are multiples of DTypeBytes. What is cached is
// called a latent; a dense cache is the case of one group per KV head whose
// latent is the head's key or value itself.
struct KvSideView {
  void* arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  const int64_t* group_offset_bytes = nullptr;  // [num_groups]
  int64_t num_groups = 0;                       // G
  int64_t slot_stride_bytes = 0;
  int64_t width = 0;  // numbers per slot and group: D, or the rank R
  DType dtype = DType::kBf16;
};

inline char* SlotAddress(const KvSideView& view, int64_t page, int64_t group,
                         int64_t slot) {
  return static_cast<char*>(view.arena) + page * view.page_bytes +
         view.group_offset_bytes[group] + slot * view.slot_stride_bytes;
}

}  // namespace kvasir::kernels
