// Tables of an op that are constant after load, on the device.
#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// Owns: the memory of what was added, under the tag "other". Plain pointers
// inside of a table's elements are addresses of tables added before.
class DeviceTables {
 public:
  explicit DeviceTables(Device* device) : device_(device) {}

  // A copy of `host`; null for none.
  template <typename T>
  absl::StatusOr<DevicePtr<const T>> Add(absl::Span<const T> host) {
    static_assert(std::is_trivially_copyable_v<T>);
    const size_t bytes = host.size() * sizeof(T);
    KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, device_->allocator().Allocate(
                                                     bytes, MemoryTag::kOther));
    KVASIR_RETURN_IF_ERROR(device_->Write(buffer.data(), host.data(), bytes));
    buffers_.push_back(std::move(buffer));
    return DevicePtr<const T>(buffers_.back().as<T>());
  }

 private:
  Device* device_;
  std::vector<DeviceBuffer> buffers_;
};

// What is constant after load of an op: its Prepare checks the host's tables
// and copies them, once; running it takes what a step gives. Movable.
template <typename Params>
struct Prepared {
  explicit Prepared(Device* device) : tables(device) {}
  Params params;  // all but what a step gives
  DeviceTables tables;
};

}  // namespace kvasir::kernels
