#include <algorithm>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/rowwise/embedding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rowwise/embedding_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
void EmbedRow(const EmbeddingArgs& params, int64_t id, float* out) {
  if (params.table != nullptr) {
    const T* row = static_cast<const T*>(params.table) + id * params.hidden;
    const Vec scale = Broadcast(params.scale);
    int64_t i = 0;
    for (; i + kVecLanes <= params.hidden; i += kVecLanes) {
      hn::StoreU(hn::Mul(scale, LoadFloats(row + i)), kFloats, out + i);
    }
    for (; i < params.hidden; ++i) out[i] = params.scale * ToFloat(row[i]);
    return;
  }
  const T* column = static_cast<const T*>(params.packed.data) +
                    id / kPanelColumns * params.hidden * kPanelColumns +
                    id % kPanelColumns;
  for (int64_t i = 0; i < params.hidden; ++i) {
    out[i] = params.scale * ToFloat(column[i * kPanelColumns]);
  }
}

template <typename T>
void AddRow(const T* row, int64_t hidden, float* out) {
  int64_t i = 0;
  for (; i + kVecLanes <= hidden; i += kVecLanes) {
    hn::StoreU(hn::Add(LoadFloats(out + i), LoadFloats(row + i)), kFloats,
               out + i);
  }
  for (; i < hidden; ++i) out[i] = out[i] + ToFloat(row[i]);
}

// Calls function(T{}), where T is the type of the table's elements.
template <typename Function>
void OfType(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF32:
      return function(float());
    case DType::kF16:
      return function(F16());
    case DType::kBf16:
      return function(Bf16());
  }
}

void EmbedRows(const EmbeddingArgs& params, int64_t begin, int64_t end) {
  const DType dtype =
      params.table != nullptr ? params.table_dtype : params.packed.dtype;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t id = params.ids[t] - params.first_id;
    float* out = params.out + t * params.hidden;
    if (id < 0 || id >= params.vocab) {
      std::fill_n(out, params.hidden, 0.0f);
    } else {
      OfType(dtype,
             [&](auto zero) { EmbedRow<decltype(zero)>(params, id, out); });
    }
    if (params.position_table == nullptr) continue;
    const int64_t position = params.positions[t];
    if (position < 0 || position >= params.num_positions) continue;
    OfType(params.position_dtype, [&](auto zero) {
      AddRow(static_cast<const decltype(zero)*>(params.position_table) +
                 position * params.hidden,
             params.hidden, out);
    });
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(EmbedRows);
}  // namespace

void EmbeddingSimd(const EmbeddingArgs& params, CpuStream& stream) {
  // The cost per number is relative to a copy. In a packed table the numbers of
  // a row are far apart, so each costs a cache miss.
  const int64_t cost = params.table != nullptr ? 1 : 8;
  ForRows(stream, params.num_tokens, cost * params.hidden,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(EmbedRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
