// embedding: looks up the rows of the embedding table for token ids, and adds
// learned positions if the model has them. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

// out[t, :] = scale * float32(table[ids[t] - first_id, :]). If the output head
// uses the same weights (a tied head), the packed weights of the head serve as
// the table.
//
// An id outside [first_id, first_id + vocab) gives a row of zeros. So if the
// table is split over ranks, the sum of the rows of all ranks is the row of the
// whole table.
//
// With learned positions, out[t, :] += float32(position_table[positions[t],
// :]). A position outside the table adds nothing.
template <template <typename> class Ptr>
struct EmbeddingParamsIn {
  Ptr<const int32_t> ids = nullptr;  // [T]
  int64_t num_tokens = 0;            // T
  int64_t first_id = 0;              // first id of this table
  int64_t vocab = 0;                 // V, rows of the table; may be 0
  int64_t hidden = 0;                // M
  Ptr<const void> table = nullptr;   // [V, M]; null: use `packed`
  DType table_dtype = DType::kF32;
  // used if `table` is null: n == V and k == M, in the device's layout
  PackedMatrixIn<Ptr> packed;
  Ptr<const void> position_table = nullptr;  // [num_positions, M]; null: none
  DType position_dtype = DType::kF32;
  int64_t num_positions = 0;
  Ptr<const int64_t> positions = nullptr;  // [T]
  Ptr<float> out = nullptr;                // [T, M]
  DType dtype = DType::kF32;               // the type of activations
  float scale = 1.0f;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(ids, packed.data, table, position_table, positions, out);
  }
};
using EmbeddingParams = EmbeddingParamsIn<DevicePtr>;
using EmbeddingArgs = EmbeddingParamsIn<LaunchPtr>;

class CpuStream;
void EmbeddingReference(const EmbeddingArgs& params, CpuStream& stream);
void EmbeddingSimd(const EmbeddingArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
