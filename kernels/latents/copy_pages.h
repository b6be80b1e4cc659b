// copy_pages: whole pages from one id to another within an arena, for
// copy-on-write. C++17.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

struct PagePair {
  int32_t from;
  int32_t to;
};

// Page pairs[i].to becomes a copy of page pairs[i].from. No page is both read
// and written in one launch, none is written twice.
struct CopyPagesParams {
  void* arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  int64_t num_pages = 0;            // N
  const PagePair* pairs = nullptr;  // host memory
  int64_t num_pairs = 0;
};

class CpuStream;
void CopyPagesReference(const CopyPagesParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
