#include "kernels/device/stream.h"
#include "kernels/rowwise/embedding.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void EmbedRow(const EmbeddingArgs& params, int64_t id, float* out) {
  if (params.table != nullptr) {
    const T* row = static_cast<const T*>(params.table) + id * params.hidden;
    for (int64_t i = 0; i < params.hidden; ++i) {
      out[i] = params.scale * ToFloat(row[i]);
    }
    return;
  }
  const T* column = static_cast<const T*>(params.packed.data) +
                    id / kPanelColumns * params.hidden * kPanelColumns +
                    id % kPanelColumns;
  for (int64_t i = 0; i < params.hidden; ++i) {
    out[i] = params.scale * ToFloat(column[i * kPanelColumns]);
  }
}

void AddPosition(const EmbeddingArgs& params, int64_t token, float* out) {
  if (params.position_table == nullptr) return;
  const int64_t position = params.positions[token];
  if (position < 0 || position >= params.num_positions) return;
  VisitDType(params.position_dtype, [&](auto type) {
    const auto* row =
        static_cast<const decltype(type)*>(params.position_table) +
        position * params.hidden;
    for (int64_t i = 0; i < params.hidden; ++i)
      out[i] = out[i] + ToFloat(row[i]);
  });
}

}  // namespace

void EmbeddingReference(const EmbeddingArgs& params, CpuStream&) {
  const DType dtype =
      params.table != nullptr ? params.table_dtype : params.packed.dtype;
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    const int64_t id = params.ids[t] - params.first_id;
    float* out = params.out + t * params.hidden;
    if (id < 0 || id >= params.vocab) {
      for (int64_t i = 0; i < params.hidden; ++i) out[i] = 0.0f;
    } else {
      VisitDType(dtype,
                 [&](auto type) { EmbedRow<decltype(type)>(params, id, out); });
    }
    AddPosition(params, t, out);
  }
}

}  // namespace kvasir::kernels
