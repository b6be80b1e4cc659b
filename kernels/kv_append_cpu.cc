#include "kernels/kv_append.h"
#include "kernels/parallel.h"
#include "kernels/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kv_append_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void StoreNumbers(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

void StoreNumbers(const float* from, int64_t count, Bf16* to) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::RebindToUnsigned<Floats> d32;
  const hn::Rebind<uint16_t, Floats> d16;
  const hn::RebindToSigned<Floats> di32;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec number = LoadFloats(from + i);
    const auto bits = hn::BitCast(d32, number);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40u));
    const auto chosen =
        hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(number)), quiet, rounded);
    // Values fit into 16 bits, so the saturating narrowing keeps them.
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, chosen)), d16,
               reinterpret_cast<uint16_t*>(to) + i);
  }
#endif
  for (; i < count; ++i) to[i] = ToBf16(from[i]);
}

void StoreNumbers(const float* from, int64_t count, F16* to) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::Rebind<hwy::float16_t, Floats> d16;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    hn::StoreU(hn::DemoteTo(d16, LoadFloats(from + i)), d16,
               reinterpret_cast<hwy::float16_t*>(to) + i);
  }
#endif
  for (; i < count; ++i) to[i] = ToF16(from[i]);
}

template <typename T>
void AppendAs(const KvSideView& view, const float* row, int64_t slot,
              int64_t page_tokens) {
  for (int64_t g = 0; g < view.num_groups; ++g) {
    StoreNumbers(row + g * view.width, view.width,
                 reinterpret_cast<T*>(SlotAddress(view, slot / page_tokens, g,
                                                  slot % page_tokens)));
  }
}

void AppendSide(const KvSideView& view, const float* row, int64_t slot,
                int64_t page_tokens) {
  switch (view.dtype) {
    case DType::kF32:
      return AppendAs<float>(view, row, slot, page_tokens);
    case DType::kF16:
      return AppendAs<F16>(view, row, slot, page_tokens);
    case DType::kBf16:
      return AppendAs<Bf16>(view, row, slot, page_tokens);
  }
}

void AppendRows(const KvAppendParams& params, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = params.slots[t];
    if (slot < 0) continue;
    AppendSide(params.key_view, params.key + t * params.key_row_stride, slot,
               params.page_tokens);
    AppendSide(params.value_view, params.value + t * params.value_row_stride,
               slot, params.page_tokens);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(AppendRows);
}  // namespace

void KvAppendSimd(const KvAppendParams& params, CpuStream& stream) {
  const int64_t numbers =
      params.key_view.num_groups * params.key_view.width +
      params.value_view.num_groups * params.value_view.width;
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(AppendRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
