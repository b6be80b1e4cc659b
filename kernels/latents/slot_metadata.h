// SlotMetadata describes the data that eviction needs for a slot in addition
// to its latents. They are the attention mass that the slot has received
// (its score), its position, and the quantization errors of its key and
// value. C++17.
//
// A unit is a set of KV heads that evict the same tokens. Each page has a plane
// [units][slots] for each kind of data, after its tiles. So the data of many
// slots is contiguous.
#pragma once

#include <cstdint>

#include "base/error_byte.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// The two sides of a layer, each of which may have a plane of
// quantization errors.
inline constexpr int kErrorSides = 2;
enum ErrorSide : int { kKeyError = 0, kValueError = 1 };

// The metadata of a layer. If num_units is 0, the other members are not used.
template <template <typename> class Ptr>
struct SlotMetadataIn {
  Ptr<void> arena = nullptr;  // [N, page_bytes]
  int64_t page_bytes = 0;
  int64_t page_tokens = 0;  // P
  int64_t num_units = 0;    // U; 0: the layer evicts nothing
  // Offsets of the planes in a page. Each is a multiple of the size of one
  // element of its plane.
  int64_t scores_offset = 0;     // [U, P] float32
  int64_t positions_offset = 0;  // [U, P] uint32
  // Offsets of the planes with the quantization errors of keys and of values
  // (indexed by ErrorSide): [U, P] bytes, as EncodeError returns them. Negative
  // if the side is stored without codes, so that it has no errors and no plane.
  int64_t error_offset[kErrorSides] = {-1, -1};
};
using SlotMetadata = SlotMetadataIn<DevicePtr>;
using SlotMetadataArgs = SlotMetadataIn<LaunchPtr>;

// The address of a plane's numbers for one unit and all slots of a page [P].
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
// The errors of a side (keys or values) for one unit and all slots of a page
// [P]; null if the side has no errors.
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
