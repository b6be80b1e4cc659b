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

// Page pairs[i].to becomes a copy of page pairs[i].from; a pair of one page
// with itself copies nothing (padding). Of the others, no page is both read and
// written in one launch, and none is written twice. The pairs are on the
// device: whoever makes them checks that their pages are of the arena.
template <template <typename> class Ptr>
struct CopyPagesParamsIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  Ptr<const PagePair> pairs = nullptr;  // [num_pairs]
  int64_t num_pairs = 0;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(arena, pairs);
  }
};
using CopyPagesParams = CopyPagesParamsIn<DevicePtr>;
using CopyPagesArgs = CopyPagesParamsIn<LaunchPtr>;

class CpuStream;
void CopyPagesReference(const CopyPagesArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
