// Number formats of stored tensors, and scalar conversions that define every
// bit of a result, even of NaN. Most kernels on a GPU use the conversions of
// simt/numbers.h instead. C++17, because device code includes this.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace kvasir::kernels {

enum class DType : uint8_t { kF32, kF16, kBf16 };

KVASIR_HOST_DEVICE constexpr int64_t DTypeBytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

constexpr const char* DTypeName(DType dtype) {
  return dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16";
}

// The bits of a stored number. C++17 has no arithmetic type of this format.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType kValue = DType::kF32;
};
template <>
struct DTypeOf<F16> {
  static constexpr DType kValue = DType::kF16;
};
template <>
struct DTypeOf<Bf16> {
  static constexpr DType kValue = DType::kBf16;
};

KVASIR_HOST_DEVICE inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

KVASIR_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

KVASIR_HOST_DEVICE inline float ToFloat(float value) { return value; }

KVASIR_HOST_DEVICE inline float ToFloat(Bf16 value) {
  return FloatOf(static_cast<uint32_t>(value.bits) << 16);
}

KVASIR_HOST_DEVICE inline float ToFloat(F16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    const float magnitude = static_cast<float>(mantissa) * FloatOf(103u << 23);
    return FloatOf(sign | BitsOf(magnitude));
  }
  if (exponent == 31) return FloatOf(sign | 0x7f800000u | (mantissa << 13));
  return FloatOf(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to nearest, ties to even; NaN becomes a quiet NaN.
KVASIR_HOST_DEVICE inline Bf16 ToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return Bf16{
      static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds to nearest, ties to even; numbers that are too large become infinity.
KVASIR_HOST_DEVICE inline F16 ToF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {  // NaN becomes quiet and keeps its top bits
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    half = (rounded - 0x38000000u) >> 13;
  } else {  // subnormal: adding 0.5 rounds value * 2^24 into the low bits
    half = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u;
  }
  return F16{static_cast<uint16_t>(sign | half)};
}

template <typename T>
KVASIR_HOST_DEVICE T FromFloat(float value);
template <>
KVASIR_HOST_DEVICE inline float FromFloat<float>(float value) {
  return value;
}
template <>
KVASIR_HOST_DEVICE inline F16 FromFloat<F16>(float value) {
  return ToF16(value);
}
template <>
KVASIR_HOST_DEVICE inline Bf16 FromFloat<Bf16>(float value) {
  return ToBf16(value);
}

// Calls visitor(T{}) with the storage type of `dtype`.
template <typename Visitor>
auto VisitDType(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::kF16:
      return visitor(F16{});
    case DType::kBf16:
      return visitor(Bf16{});
    case DType::kF32:
      break;
  }
  return visitor(float{});
}

}  // namespace kvasir::kernels
