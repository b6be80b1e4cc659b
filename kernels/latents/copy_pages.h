// copy_pages: whole pages from one id to another within an arena, for
// copy-on-write. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

struct PagePair {
  int32_t from;
  int32_t to;
};

// Page pairs[i].to becomes a copy of page pairs[i].from. No page is both read
// and written in one launch, none is written twice.
template <template <typename> class Ptr>
struct CopyPagesParamsIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  int64_t num_pages = 0;  // N
  const PagePair* pairs =
      nullptr;  // host memory, used before the launch returns
  int64_t num_pairs = 0;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(arena);
  }
};
using CopyPagesParams = CopyPagesParamsIn<DevicePtr>;
using CopyPagesArgs = CopyPagesParamsIn<LaunchPtr>;

class CpuStream;
void CopyPagesReference(const CopyPagesArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
