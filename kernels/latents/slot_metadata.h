// What eviction keeps of a slot beside its latents: the attention mass that it
// received, its position, and how badly its key and value were quantized.
// C++17.
//
// A unit is a set of KV heads that give up the same tokens. The planes lie in a
// layer's pages behind the tiles, each [units][slots of the page], so that what
// many slots have of one kind is read in one run.
#pragma once

#include <cstdint>

#include "base/error_byte.h"
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
KVASIR_HOST_DEVICE inline char* PlaneOfUnit(const SlotMetadataArgs& metadata,
                                            int64_t offset,
                                            int64_t number_bytes, int64_t page,
                                            int64_t unit) {
  return static_cast<char*>(metadata.arena) + page * metadata.page_bytes +
         offset + unit * metadata.page_tokens * number_bytes;
}
KVASIR_HOST_DEVICE inline float* ScoresOf(const SlotMetadataArgs& metadata,
                                          int64_t page, int64_t unit) {
  return reinterpret_cast<float*>(
      PlaneOfUnit(metadata, metadata.scores_offset, sizeof(float), page, unit));
}
KVASIR_HOST_DEVICE inline uint32_t* PositionsOf(
    const SlotMetadataArgs& metadata, int64_t page, int64_t unit) {
  return reinterpret_cast<uint32_t*>(PlaneOfUnit(
      metadata, metadata.positions_offset, sizeof(uint32_t), page, unit));
}
// Null where the side has no codes.
KVASIR_HOST_DEVICE inline uint8_t* ErrorsOf(const SlotMetadataArgs& metadata,
                                            int side, int64_t page,
                                            int64_t unit) {
  const int64_t offset = metadata.error_offset[side];
  return offset < 0 ? nullptr
                    : reinterpret_cast<uint8_t*>(
                          PlaneOfUnit(metadata, offset, 1, page, unit));
}

using base::DecodeError;
using base::EncodeError;

}  // namespace kvasir::kernels
