#include "kernels/device/device.h"

#include <algorithm>
#include <cstring>

#include "base/machine.h"
#include "base/status_macros.h"

namespace kvasir::kernels {

absl::StatusOr<DeviceMemory> Device::memory() const {
  const base::MachineLimits limits = base::ReadMachineLimits();
  DeviceMemory memory;
  memory.total_bytes = limits.memory_bytes;
  memory.allocated_bytes =
      std::min(allocator().device_bytes(), memory.total_bytes);
  // The system counts memory as available until it is touched, even if it
  // is allocated. So the free memory is also limited to the memory that is
  // not allocated.
  memory.free_bytes = std::min(limits.available_bytes,
                               memory.total_bytes - memory.allocated_bytes);
  memory.other_bytes =
      memory.total_bytes - memory.allocated_bytes - memory.free_bytes;
  return memory;
}

absl::Status Device::Write(DevicePtr<void> memory, const void* host,
                           size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(void* const to, BeginWrite(memory, bytes));
  std::memcpy(to, host, bytes);
  return EndWrite(memory, to, bytes);
}

absl::StatusOr<void*> CpuDevice::BeginWrite(DevicePtr<void> memory, size_t) {
  if (guard_ != nullptr) {
    guard_->Check("write", memory.device_address());
    guard_->Open();
  }
  return memory.device_address();
}

absl::Status CpuDevice::EndWrite(DevicePtr<void>, void*, size_t) {
  if (guard_ != nullptr) guard_->Close();
  return absl::OkStatus();
}

void CpuDevice::CheckMemory(const char* op,
                            DevicePtr<const void> pointer) const {
  if (guard_ != nullptr) guard_->Check(op, pointer.device_address());
}

}  // namespace kvasir::kernels
