// What eviction keeps of a slot beside its latents: the attention mass that it
// received, its position, and how badly its key and value were quantized.
// C++17.
//
// A unit is a set of KV heads that give up the same tokens. The planes lie in a
// layer's pages behind the tiles, each [units][slots of the page], so that what
// many slots have of one kind is read in one run.
#pragma once

#include <cstdint>

#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Sides whose errors a plane has.
inline constexpr int kErrorSides = 2;
enum ErrorSide : int { kKeyError = 0, kValueError = 1 };

// Of a layer. Without units nothing else counts.
template <template <typename> class Ptr>
struct SlotMetadataIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  int64_t page_tokens = 0;  // P
  int64_t num_units = 0;    // U; 0: the layer evicts nothing
  // Where planes begin in a page: multiples of their numbers' size.
  int64_t scores_offset = 0;     // [U, P] float32
  int64_t positions_offset = 0;  // [U, P] uint32
  // [U, P] bytes (EncodeError) of keys, of values; below 0: no codes, no plane.
  int64_t error_offset[kErrorSides] = {-1, -1};
};
using SlotMetadata = SlotMetadataIn<DevicePtr>;
using SlotMetadataArgs = SlotMetadataIn<LaunchPtr>;

// What a page's slots have of a unit [P].
inline char* PlaneOfUnit(const SlotMetadataArgs& metadata, int64_t offset,
                         int64_t number_bytes, int64_t page, int64_t unit) {
  return static_cast<char*>(metadata.arena) + page * metadata.page_bytes +
         offset + unit * metadata.page_tokens * number_bytes;
}
inline float* ScoresOf(const SlotMetadataArgs& metadata, int64_t page,
                       int64_t unit) {
  return reinterpret_cast<float*>(
      PlaneOfUnit(metadata, metadata.scores_offset, sizeof(float), page, unit));
}
inline uint32_t* PositionsOf(const SlotMetadataArgs& metadata, int64_t page,
                             int64_t unit) {
  return reinterpret_cast<uint32_t*>(PlaneOfUnit(
      metadata, metadata.positions_offset, sizeof(uint32_t), page, unit));
}
// Null where the side has no codes.
inline uint8_t* ErrorsOf(const SlotMetadataArgs& metadata, int side,
                         int64_t page, int64_t unit) {
  const int64_t offset = metadata.error_offset[side];
  return offset < 0 ? nullptr
                    : reinterpret_cast<uint8_t*>(
                          PlaneOfUnit(metadata, offset, 1, page, unit));
}

// An error as a byte: 0 stands for 0, code c for 2^((c - 1) / 6 - 24), from the
// least number of float16 to 2^18.3. The nearest code in the logarithm, so an
// error in that range comes back within a factor of 2^(1/12) (6 %); smaller
// ones become 1, greater ones and NaN 255. Monotone, and the same on every
// machine: comparisons alone.
inline constexpr int kErrorStepsPerOctave = 6;
inline constexpr int kErrorLeastExponent = -24;

inline uint8_t EncodeError(float error) {
  // 2^(1/12), 2^(3/12), ...: borders between the codes of an octave.
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

inline float DecodeError(uint8_t code) {
  // 2^(i / 6)
  constexpr float kSteps[kErrorStepsPerOctave] = {
      1.0f, 1.1224620f, 1.2599210f, 1.4142135f, 1.5874011f, 1.7817974f};
  if (code == 0) return 0.0f;
  const int octave = (code - 1) / kErrorStepsPerOctave;
  const float step = kSteps[(code - 1) % kErrorStepsPerOctave];
  return step * static_cast<float>(int64_t{1} << octave) * 0x1p-24f;
}

}  // namespace kvasir::kernels
