// Tables that an op reads on the device. They are copied when the model is
// loaded and do not change.
#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// Copies tables to device memory, which this object owns (counted under the tag
// "other"). If a table's elements point to other tables, add the other tables
// first and store their device addresses.
class DeviceTables {
 public:
  explicit DeviceTables(Device* device) : device_(device) {}

  // Copies `host` to the device and returns the copy; null if `host` is empty.
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

// The parameters of an op that are constant after load, and the tables to which
// they point. The op's Prepare function makes this object once, from tables in
// host memory. A run of the op then needs only this object and the data of a
// step. Movable.
template <typename Params>
struct Prepared {
  explicit Prepared(Device* device) : tables(device) {}
  Params params;  // everything except the data of a step
  DeviceTables tables;
};

}  // namespace kvasir::kernels
