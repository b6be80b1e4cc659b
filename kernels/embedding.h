// embedding: token ids to rows of the embedding table, as float32. C++17.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/matmul.h"

namespace kvasir::kernels {

// out[t, :] = float32(table[ids[t], :]). The table is either row-major or, for
// a head tied to the embedding, the packed head itself (so that one copy
// serves both). An id outside [0, vocab) gives a row of zeros: ids are checked
// where they enter, this only keeps a mistake from reading foreign memory.
struct EmbeddingParams {
  const int32_t* ids = nullptr;  // [T]
  int64_t num_tokens = 0;        // T
  int64_t vocab = 0;             // V
  int64_t hidden = 0;            // M
  const void* table = nullptr;   // [V, M]; null: use `packed`
  DType table_dtype = DType::kF32;
  PackedMatrix packed;   // n == V, k == M
  float* out = nullptr;  // [T, M]
};

class CpuStream;
void EmbeddingReference(const EmbeddingParams& params, CpuStream& stream);
void EmbeddingSimd(const EmbeddingParams& params, CpuStream& stream);

}  // namespace kvasir::kernels
