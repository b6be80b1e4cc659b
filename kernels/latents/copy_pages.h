// copy_pages: copies whole pages within an arena (for copy-on-write), or
// between an arena of the device and one of the host pool. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

struct PagePair {
  int32_t from;
  int32_t to;
};

// For every i, copies page pairs[i].from of the arena `from` to page
// pairs[i].to of the arena `to`. A pair whose `from` is below 0 is padding and
// copies nothing. In one launch no page may be both read and written, or
// written twice. The op cannot check the pairs, because they are in device
// memory. The caller must ensure that the pages exist.
template <template <typename> class Ptr>
struct CopyPagesParamsIn {
  Ptr<const void> from = nullptr;  // [N, page_bytes]
  Ptr<void> to = nullptr;          // [N', page_bytes]; may be `from`
  int64_t page_bytes = 0;
  Ptr<const PagePair> pairs = nullptr;  // [num_pairs]
  int64_t num_pairs = 0;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(from, to, pairs);
  }
};
using CopyPagesParams = CopyPagesParamsIn<DevicePtr>;
using CopyPagesArgs = CopyPagesParamsIn<LaunchPtr>;

class CpuStream;
void CopyPagesReference(const CopyPagesArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
