// Codes of 8 bits as vectors of float32. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_CODES_INL_H_
#undef KVASIR_KERNELS_CODES_INL_H_
#else
#define KVASIR_KERNELS_CODES_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE Vec LoadFloats(const uint8_t* from) {
  const hn::Rebind<uint8_t, Floats> d8;
  const hn::RebindToSigned<Floats> d32;
  return hn::ConvertTo(kFloats, hn::PromoteTo(d32, hn::LoadU(d8, from)));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODES_INL_H_
