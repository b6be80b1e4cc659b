// Packs and unpacks a slot's codes (latent_view.h), channel by channel or eight
// at a time. C++17.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// The places where a slot stores the codes of one run. The lowest `low_bits`
// bits of code i begin at bit low_bit + i * low_bits of the slot. Codes of 3, 5
// or 6 bits have their other bits in a second plane, from bit high_bit + i *
// high_bits on. No plane splits the bits of a code between two bytes.
struct CodePlace {
  int64_t low_bit = 0;
  int low_bits = 0;  // 0: nothing is stored
  int64_t high_bit = 0;
  int high_bits = 0;  // 0: all bits are in one plane

  KVASIR_HOST_DEVICE int bits() const { return low_bits + high_bits; }
  KVASIR_HOST_DEVICE void Skip(int64_t codes) {
    low_bit += codes * low_bits;
    high_bit += codes * high_bits;
  }
};

// Computes where a slot stores the codes of a group. Each call of Next returns
// the place of one run, in the order of runs.
class CodeCursor {
 public:
  KVASIR_HOST_DEVICE explicit CodeCursor(const LatentGroup& group) {
    const CodePlanes planes = PlanesOf(group);
    for (int plane = 0; plane < 4; ++plane) {
      next_bit_[plane] = planes.begin_bits[plane];
    }
  }

  KVASIR_HOST_DEVICE CodePlace Next(const CodeRun& run) {
    CodePlace place;
    for (int plane = 0; plane < 4; ++plane) {
      const int bits = run.bits & PlaneBits(plane);
      if (bits == 0) continue;
      // Planes with more bits come first, so the first plane has the code's low
      // bits.
      const bool low = place.low_bits == 0;
      (low ? place.low_bits : place.high_bits) = bits;
      (low ? place.low_bit : place.high_bit) = next_bit_[plane];
      next_bit_[plane] += run.width * bits;
    }
    return place;
  }

 private:
  int64_t next_bit_[4];
};

KVASIR_HOST_DEVICE inline unsigned ReadBits(const uint8_t* bytes, int64_t bit,
                                            int bits) {
  return (static_cast<unsigned>(bytes[bit / 8]) >> (bit % 8)) &
         ((1u << bits) - 1);
}
// Writes the lowest `bits` bits of a value at `bit`. The memory there must be 0
// before the call.
KVASIR_HOST_DEVICE inline void OrBits(uint8_t* bytes, int64_t bit, int bits,
                                      unsigned value) {
  bytes[bit / 8] = static_cast<uint8_t>(
      bytes[bit / 8] | (value & ((1u << bits) - 1)) << (bit % 8));
}

KVASIR_HOST_DEVICE inline unsigned ReadCode(const uint8_t* slot,
                                            const CodePlace& place,
                                            int64_t index) {
  if (place.low_bits == 0) return 0;
  unsigned code =
      ReadBits(slot, place.low_bit + index * place.low_bits, place.low_bits);
  if (place.high_bits > 0) {
    code |= ReadBits(slot, place.high_bit + index * place.high_bits,
                     place.high_bits)
            << place.low_bits;
  }
  return code;
}
// Writes one code. The slot must be zero before its first code is written.
KVASIR_HOST_DEVICE inline void WriteCode(uint8_t* slot, const CodePlace& place,
                                         int64_t index, unsigned code) {
  if (place.low_bits == 0) return;
  OrBits(slot, place.low_bit + index * place.low_bits, place.low_bits, code);
  if (place.high_bits == 0) return;
  OrBits(slot, place.high_bit + index * place.high_bits, place.high_bits,
         code >> place.low_bits);
}

// PackCodes packs codes, given as one byte per channel, into the bytes of a
// slot. UnpackCodes does the inverse.
inline void PackCodes(const LatentGroup& group, const uint8_t* codes,
                      uint8_t* slot) {
  CodeCursor cursor(group);
  std::memset(slot, 0,
              static_cast<size_t>((PlanesOf(group).total_bits + 7) / 8));
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    const CodePlace place = cursor.Next(run);
    for (int64_t i = 0; i < run.width; ++i) {
      WriteCode(slot, place, i, codes[run.begin + i]);
    }
  }
}
inline void UnpackCodes(const LatentGroup& group, const uint8_t* slot,
                        uint8_t* codes) {
  CodeCursor cursor(group);
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    const CodePlace place = cursor.Next(run);
    for (int64_t i = 0; i < run.width; ++i) {
      codes[run.begin + i] = static_cast<uint8_t>(ReadCode(slot, place, i));
    }
  }
}

// Returns the lowest kBits bits of each of eight codes, packed side by side.
// `eight` has one code per byte, the first in the lowest byte.
template <int kBits>
KVASIR_HOST_DEVICE uint64_t Squeeze(uint64_t eight) {
  static_assert(kBits == 1 || kBits == 2 || kBits == 4);
  constexpr uint64_t kBytes = 0x0101010101010101;
  constexpr uint64_t kPairs = 0x0001000100010001;
  constexpr uint64_t kFours = 0x0000000100000001;
  constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  constexpr uint64_t kMask2 = (uint64_t{1} << (2 * kBits)) - 1;
  constexpr uint64_t kMask4 = (uint64_t{1} << (4 * kBits)) - 1;
  eight &= kBytes * kMask;
  eight = (eight | eight >> (8 - kBits)) & (kPairs * kMask2);
  eight = (eight | eight >> (16 - 2 * kBits)) & (kFours * kMask4);
  return (eight | eight >> (32 - 4 * kBits)) &
         ((uint64_t{1} << (8 * kBits)) - 1);
}

// For each i < count, ORs the lowest kBits bits of codes[i] >> shift into the
// slot, from bit number bit + i * kBits on. Accesses only bytes that receive
// bits. Requires a little-endian machine.
template <int kBits>
void PackPlane(const uint8_t* codes, int64_t count, int shift, int64_t bit,
               uint8_t* slot) {
  int64_t i = 0;
  const int in_byte = static_cast<int>(bit % 8);
  uint8_t* to = slot + bit / 8;
  for (; i + 8 <= count; i += 8, to += kBits) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    const uint64_t packed = Squeeze<kBits>(eight >> shift);
    if (in_byte == 0) {
      std::memcpy(to, &packed, kBits);
      continue;
    }
    // Planes with fewer than 8 bits per code may begin inside a byte. Then
    // eight codes take parts of kBits + 1 bytes.
    const uint64_t moved = packed << in_byte;
    for (int byte = 0; byte <= kBits; ++byte) {
      to[byte] = static_cast<uint8_t>(to[byte] | moved >> (8 * byte));
    }
  }
  for (; i < count; ++i) {
    OrBits(slot, bit + i * kBits, kBits,
           static_cast<unsigned>(codes[i]) >> shift);
  }
}

// Does the same as WriteCode for codes [first, first + count) of a run.
inline void WriteCodes(uint8_t* slot, const CodePlace& place, int64_t first,
                       const uint8_t* codes, int64_t count) {
  const int64_t bit = place.low_bit + first * place.low_bits;
  switch (place.low_bits) {
    case 0:
      return;
    case 8:
      std::memcpy(slot + bit / 8, codes, static_cast<size_t>(count));
      break;
    case 4:
      PackPlane<4>(codes, count, 0, bit, slot);
      break;
    case 2:
      PackPlane<2>(codes, count, 0, bit, slot);
      break;
    default:
      PackPlane<1>(codes, count, 0, bit, slot);
  }
  const int64_t high_bit = place.high_bit + first * place.high_bits;
  if (place.high_bits == 1) {
    PackPlane<1>(codes, count, place.low_bits, high_bit, slot);
  } else if (place.high_bits == 2) {
    PackPlane<2>(codes, count, place.low_bits, high_bit, slot);
  }
}

}  // namespace kvasir::kernels
