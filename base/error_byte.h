// Encodes a quantization error as one byte, which is stored in the metadata of
// a cache slot. The server and the oracle (the independent reference
// implementation) share this encoding, so that both compare equal errors and
// evict the same slots. C++17, for CUDA.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvasir::base {

// Encodes an error as one byte. Code 0 means 0, and code c means 2^((c - 1) / 6
// - 24): from 2^-24, the smallest float16 number, to 2^18.3. In that range, the
// decoded error is within a factor of 2^(1/12) (6 %). Smaller errors get code
// 1; greater ones and NaN get 255. The encoding is monotone. It only compares
// and doubles numbers, without rounding, so all machines give the same result.
inline constexpr int kErrorStepsPerOctave = 6;
inline constexpr int kErrorLeastExponent = -24;

KVASIR_HOST_DEVICE inline uint8_t EncodeError(float error) {
  // The borders between neighbouring codes: 2^(1/12), 2^(3/12), ...
  constexpr float kBorders[kErrorStepsPerOctave] = {
      1.0594631f, 1.1892071f, 1.3348398f, 1.4983071f, 1.6817929f, 1.8877486f};
  if (error == 0.0f) return 0;
  if (!(error < 0x1p19f)) return 255;
  if (!(error >= 0x1p-24f)) return 1;
  int exponent = kErrorLeastExponent;
  float power = 0x1p-24f;
  while (error >= 2.0f * power) {
    power = 2.0f * power;
    ++exponent;
  }
  int code = 1 + (exponent - kErrorLeastExponent) * kErrorStepsPerOctave;
  for (const float border : kBorders) code += error >= border * power ? 1 : 0;
  return static_cast<uint8_t>(code < 255 ? code : 255);
}

KVASIR_HOST_DEVICE inline float DecodeError(uint8_t code) {
  // kSteps[i] is 2^(i / 6).
  constexpr float kSteps[kErrorStepsPerOctave] = {
      1.0f, 1.1224620f, 1.2599210f, 1.4142135f, 1.5874011f, 1.7817974f};
  if (code == 0) return 0.0f;
  const int octave = (code - 1) / kErrorStepsPerOctave;
  const float step = kSteps[(code - 1) % kErrorStepsPerOctave];
  return step * static_cast<float>(int64_t{1} << octave) * 0x1p-24f;
}

}  // namespace kvasir::base
