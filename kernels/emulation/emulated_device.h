// EmulatedDevice: runs the source code of the GPU kernels on the host, for
// tests and for development without a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/device/device.h"
#include "kernels/device/device_ops.h"
#include "kernels/device/guarded_memory.h"
#include "kernels/emulation/emulator.h"

namespace kvasir::kernels::emulation {

struct EmulatedDeviceOptions {
  EmulatorOptions emulator;
  int64_t memory_limit_bytes = 0;  // 0: no limit except kReservedBytes
  DType activations = DType::kBf16;
};

// To ops, this device is a GPU (DeviceKind::kCuda): weights are in rows, pages
// in granules of 16 bytes. To find faults, fresh memory is filled with 0xff,
// and a guard page follows each allocation. The host can access memory only
// while work runs on the device.
//
// Enqueued work waits until a stream is synchronized or destroyed, or memory is
// freed. BeginWrite returns host memory, never the device's own. Streams can
// capture work and replay it (LaunchStream).
//
// Threads: all methods may be called from any thread. Kernels run one at a
// time, each on the thread that synchronizes.
class EmulatedDevice final : public Device {
 public:
  // The size of the address space that the device reserves.
  // GuardedMemory::CheckReservable checks whether the system can provide it.
  static constexpr size_t kReservedBytes = size_t{1} << 38;
  // The device supports only the ops in `ops`. emulated::Ops()
  // (op_table/op_table.h) returns all ops.
  EmulatedDevice(const EmulatedDeviceOptions& options, const DeviceOps& ops);
  ~EmulatedDevice() override;

  Emulator& emulator();

  std::unique_ptr<Stream> MakeStream() override;
  std::string name() const override { return "emulated"; }
  DType activations() const override { return activations_; }
  int num_threads() const override { return 1; }
  WeightLayout weight_layout() const override { return WeightLayout::kRows; }
  int64_t page_granule_bytes() const override { return 16; }
  int64_t cta_shared_bytes() const override;
  absl::StatusOr<void*> BeginWrite(DevicePtr<void> memory,
                                   size_t bytes) override;
  absl::Status EndWrite(DevicePtr<void> memory, void* host,
                        size_t bytes) override;
  void CheckMemory(const char* op,
                   DevicePtr<const void> pointer) const override;

 private:
  class State;
  class Allocator;
  class EmulatedStream;

  EmulatedDevice(std::shared_ptr<State> state,
                 const EmulatedDeviceOptions& options, const DeviceOps& ops);

  const std::shared_ptr<State> state_;
  const DeviceOps ops_;
  const DType activations_;
};

}  // namespace kvasir::kernels::emulation
