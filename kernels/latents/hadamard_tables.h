// The blocks and signs that the hadamard op reads, one set for all latents of
// a model, on the device.
#pragma once

#include <cstdint>
#include <map>

#include "absl/status/statusor.h"
#include "kernels/device/device_tables.h"
#include "kernels/latents/hadamard.h"

namespace kvasir::kernels {

// Owns: the blocks of every width that was asked for, and the signs of their
// kernels. Both stay where they are as long as the tables do.
// Threads: one at a time.
class HadamardTables {
 public:
  // Of latents of one width.
  struct Blocks {
    DevicePtr<const HadamardBlock> device;
    int64_t count = 0;
    int64_t scratch_floats = 0;  // the largest block, twice
  };

  explicit HadamardTables(Device* device) : tables_(device) {}
  HadamardTables(const HadamardTables&) = delete;
  HadamardTables& operator=(const HadamardTables&) = delete;

  // For latents of `width` channels (at least 1).
  absl::StatusOr<const Blocks*> Of(int64_t width);

 private:
  struct Kernel {
    int64_t stride = 0;
    DevicePtr<const float> columns;
    DevicePtr<const float> rows;
  };
  absl::StatusOr<HadamardBlock> BlockOf(int64_t order);

  DeviceTables tables_;
  std::map<int64_t, Blocks> blocks_;   // by width
  std::map<int64_t, Kernel> kernels_;  // by their order
};

}  // namespace kvasir::kernels
