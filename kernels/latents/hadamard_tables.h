// HadamardTables keeps the tables in device memory that the hadamard op reads.
// They have the diagonal blocks of the Hadamard matrices, and the entries (+1
// or -1) of each block's matrix K (hadamard.h). All latents of a model share
// one such object.
#pragma once

#include <cstdint>
#include <map>

#include "absl/status/statusor.h"
#include "kernels/device/device_tables.h"
#include "kernels/latents/hadamard.h"

namespace kvasir::kernels {

// Owns: the blocks for every width that was requested, and the signs of their
// kernel matrices. Their addresses do not change while this object lives.
// Threads: calls must not overlap.
class HadamardTables {
 public:
  // The blocks of latents of one width.
  struct Blocks {
    DevicePtr<const HadamardBlock> device;
    int64_t count = 0;
    int64_t scratch_floats = 0;  // twice the order of the largest block
  };

  explicit HadamardTables(Device* device) : tables_(device) {}
  HadamardTables(const HadamardTables&) = delete;
  HadamardTables& operator=(const HadamardTables&) = delete;

  // The blocks for latents of `width` channels (at least 1).
  absl::StatusOr<const Blocks*> BlocksFor(int64_t width);

 private:
  struct Kernel {
    int64_t stride = 0;
    DevicePtr<const float> columns;
    DevicePtr<const float> rows;
  };
  absl::StatusOr<HadamardBlock> BlockOf(int64_t order);

  DeviceTables tables_;
  std::map<int64_t, Blocks> blocks_;   // keyed by width
  std::map<int64_t, Kernel> kernels_;  // keyed by the kernel matrix's order
};

}  // namespace kvasir::kernels
