#include "kernels/device/workspace.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {
namespace {

constexpr size_t kMaxBytes = std::numeric_limits<size_t>::max() / 2;

size_t AlignUp(size_t bytes) {
  return (bytes + Workspace::kAlignmentBytes - 1) / Workspace::kAlignmentBytes *
         Workspace::kAlignmentBytes;
}

}  // namespace

Workspace::Workspace(DevicePtr<void> memory, size_t bytes) {
  const auto address = reinterpret_cast<size_t>(memory.device_address());
  const size_t skipped = AlignUp(address) - address;
  base_ = static_cast<std::byte*>(memory.device_address()) +
          std::min(skipped, bytes);
  capacity_bytes_ = bytes - std::min(skipped, bytes);
}

void* Workspace::TakeBytes(int64_t count, size_t element_bytes) {
  if (!status_.ok()) return nullptr;
  if (count < 0 || static_cast<size_t>(count) > kMaxBytes / element_bytes) {
    status_ = absl::InvalidArgumentError(absl::StrCat(
        "workspace: the number of elements of ", element_bytes,
        " bytes must be 0 to ", kMaxBytes / element_bytes, ", but is ", count));
    return nullptr;
  }
  const size_t bytes = AlignUp(static_cast<size_t>(count) * element_bytes);
  if (!counting_ && bytes > capacity_bytes_ - used_bytes_) {
    status_ = absl::ResourceExhaustedError(
        absl::StrCat("workspace: ", bytes, " bytes are needed, but only ",
                     capacity_bytes_ - used_bytes_, " of ", capacity_bytes_,
                     " bytes are free"));
    return nullptr;
  }
  void* const taken = counting_ ? nullptr : base_ + used_bytes_;
  used_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return taken;
}

}  // namespace kvasir::kernels
