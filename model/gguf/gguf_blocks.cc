#include "model/gguf/gguf_blocks.h"

#include <array>
#include <bit>
#include <cmath>

#include "absl/strings/str_join.h"

namespace kvasir::model {
namespace {

constexpr int kSuperBlock = 256;

uint16_t Load16(const uint8_t* bytes) {
  return static_cast<uint16_t>(bytes[0] | bytes[1] << 8);
}

uint32_t Load32(const uint8_t* bytes) {
  return uint32_t{Load16(bytes)} | uint32_t{Load16(bytes + 2)} << 16;
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 0x1f;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign == 0 ? magnitude : -magnitude;
  }
  const uint32_t wide = exponent == 0x1f ? 0xff : exponent + 127 - 15;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

float LoadHalf(const uint8_t* bytes) { return HalfToFloat(Load16(bytes)); }

void UnpackF32(const uint8_t* block, float* numbers) {
  *numbers = std::bit_cast<float>(Load32(block));
}
void UnpackF16(const uint8_t* block, float* numbers) {
  *numbers = LoadHalf(block);
}
void UnpackBf16(const uint8_t* block, float* numbers) {
  *numbers = std::bit_cast<float>(uint32_t{Load16(block)} << 16);
}

// The low 4 bits of the 16 bytes are the codes of the first 16 numbers; the
// high 4 bits are those of the last 16.
void UnpackQ4_0(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const uint8_t* const codes = block + 2;
  for (int i = 0; i < 16; ++i) {
    numbers[i] = d * static_cast<float>((codes[i] & 15) - 8);
    numbers[i + 16] = d * static_cast<float>((codes[i] >> 4) - 8);
  }
}

void UnpackQ4_1(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const float m = LoadHalf(block + 2);
  const uint8_t* const codes = block + 4;
  for (int i = 0; i < 16; ++i) {
    numbers[i] = d * static_cast<float>(codes[i] & 15) + m;
    numbers[i + 16] = d * static_cast<float>(codes[i] >> 4) + m;
  }
}

// Bit i of `high` is the fifth bit of code i.
void UnpackQ5_0(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const uint32_t high = Load32(block + 2);
  const uint8_t* const codes = block + 6;
  for (int i = 0; i < 16; ++i) {
    const int low = (codes[i] & 15) | static_cast<int>(high >> i & 1) << 4;
    const int up = codes[i] >> 4 | static_cast<int>(high >> (i + 16) & 1) << 4;
    numbers[i] = d * static_cast<float>(low - 16);
    numbers[i + 16] = d * static_cast<float>(up - 16);
  }
}

void UnpackQ5_1(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const float m = LoadHalf(block + 2);
  const uint32_t high = Load32(block + 4);
  const uint8_t* const codes = block + 8;
  for (int i = 0; i < 16; ++i) {
    const int low = (codes[i] & 15) | static_cast<int>(high >> i & 1) << 4;
    const int up = codes[i] >> 4 | static_cast<int>(high >> (i + 16) & 1) << 4;
    numbers[i] = d * static_cast<float>(low) + m;
    numbers[i + 16] = d * static_cast<float>(up) + m;
  }
}

void UnpackQ8_0(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  for (int i = 0; i < 32; ++i) {
    numbers[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
  }
}

// Returns code i of Q2_K or Q3_K, whose codes have 2 bits. The 64 bytes are two
// halves of 32 bytes. Each half has four runs of 32 codes; the first run is in
// the lowest bits.
int TwoBits(const uint8_t* codes, int i) {
  const int run = i / 32;
  return codes[run / 4 * 32 + i % 32] >> (run % 4 * 2) & 3;
}

void UnpackQ2_K(const uint8_t* block, float* numbers) {
  const uint8_t* const scales = block;
  const uint8_t* const codes = block + 16;
  const float d = LoadHalf(block + 80);
  const float dmin = LoadHalf(block + 82);
  for (int group = 0; group < 16; ++group) {
    const float scale = d * static_cast<float>(scales[group] & 15);
    const float minimum = dmin * static_cast<float>(scales[group] >> 4);
    for (int i = group * 16; i < (group + 1) * 16; ++i) {
      numbers[i] = scale * static_cast<float>(TwoBits(codes, i)) - minimum;
    }
  }
}

// A scale has 6 bits. In the 12 bytes of scales, the first 8 bytes have the low
// 4 bits of the scales, and the last 4 bytes have the high 2 bits.
void UnpackQ3_K(const uint8_t* block, float* numbers) {
  const uint8_t* const mask = block;
  const uint8_t* const codes = block + 32;
  const uint8_t* const scales = block + 96;
  const float d = LoadHalf(block + 108);
  for (int group = 0; group < 16; ++group) {
    const int low = scales[group % 8] >> (group / 8 * 4) & 15;
    const int high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    for (int i = group * 16; i < (group + 1) * 16; ++i) {
      // If a code's bit in the mask is clear, 4 is subtracted.
      const int offset = (mask[i % 32] >> (i / 32) & 1) == 0 ? 4 : 0;
      numbers[i] = scale * static_cast<float>(TwoBits(codes, i) - offset);
    }
  }
}

struct ScaleAndMinimum {
  int scale = 0;
  int minimum = 0;
};

// Q4_K and Q5_K pack eight scales and eight minimums of 6 bits each into 12
// bytes. Returns one pair of them.
ScaleAndMinimum SixBitPair(const uint8_t* scales, int group) {
  if (group < 4) return {scales[group] & 63, scales[group + 4] & 63};
  const int both = scales[group + 4];
  return {(both & 15) | (scales[group - 4] >> 6) << 4,
          both >> 4 | (scales[group] >> 6) << 4};
}

void UnpackQ4_K(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const float dmin = LoadHalf(block + 2);
  const uint8_t* const codes = block + 16;
  for (int group = 0; group < 8; ++group) {
    const ScaleAndMinimum pair = SixBitPair(block + 4, group);
    const float scale = d * static_cast<float>(pair.scale);
    const float minimum = dmin * static_cast<float>(pair.minimum);
    for (int i = 0; i < 32; ++i) {
      const int code = codes[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
      numbers[group * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

void UnpackQ5_K(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const float dmin = LoadHalf(block + 2);
  const uint8_t* const high = block + 16;
  const uint8_t* const codes = block + 48;
  for (int group = 0; group < 8; ++group) {
    const ScaleAndMinimum pair = SixBitPair(block + 4, group);
    const float scale = d * static_cast<float>(pair.scale);
    const float minimum = dmin * static_cast<float>(pair.minimum);
    for (int i = 0; i < 32; ++i) {
      const int code = (codes[group / 2 * 32 + i] >> (group % 2 * 4) & 15) |
                       (high[i] >> group & 1) << 4;
      numbers[group * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

// A block has two halves of 128 codes of 6 bits. In each half, 64 bytes have
// the low 4 bits of four runs of 32 codes, and 32 bytes have their high 2 bits.
void UnpackQ6_K(const uint8_t* block, float* numbers) {
  const uint8_t* const low = block;
  const uint8_t* const high = block + 128;
  const uint8_t* const scales = block + 192;
  const float d = LoadHalf(block + 208);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int half = i / 128;
    const int run = i % 128 / 32;
    const int code =
        (low[half * 64 + run % 2 * 32 + i % 32] >> (run / 2 * 4) & 15) |
        (high[half * 32 + i % 32] >> (run * 2) & 3) << 4;
    const float scale =
        d * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
    numbers[i] = scale * static_cast<float>(code - 32);
  }
}

// The numbers that the codes of IQ4_NL and IQ4_XS stand for. They are not
// evenly spaced.
constexpr std::array<float, 16> kIq4Levels = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void UnpackIq4Nl(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const uint8_t* const codes = block + 2;
  for (int i = 0; i < 16; ++i) {
    numbers[i] = d * kIq4Levels[codes[i] & 15];
    numbers[i + 16] = d * kIq4Levels[codes[i] >> 4];
  }
}

void UnpackIq4Xs(const uint8_t* block, float* numbers) {
  const float d = LoadHalf(block);
  const uint32_t high = Load16(block + 2);
  const uint8_t* const low = block + 4;
  const uint8_t* const codes = block + 8;
  for (int group = 0; group < 8; ++group) {
    const int bits = (low[group / 2] >> (group % 2 * 4) & 15) |
                     static_cast<int>(high >> (2 * group) & 3) << 4;
    const float scale = d * static_cast<float>(bits - 32);
    for (int i = 0; i < 16; ++i) {
      const int both = codes[group * 16 + i];
      numbers[group * 32 + i] =
          scale * kIq4Levels[static_cast<size_t>(both & 15)];
      numbers[group * 32 + 16 + i] =
          scale * kIq4Levels[static_cast<size_t>(both >> 4)];
    }
  }
}

constexpr std::array<GgmlType, 15> kTypes = {{
    {0, "F32", 1, 4, &UnpackF32},
    {1, "F16", 1, 2, &UnpackF16},
    {2, "Q4_0", 32, 18, &UnpackQ4_0},
    {3, "Q4_1", 32, 20, &UnpackQ4_1},
    {6, "Q5_0", 32, 22, &UnpackQ5_0},
    {7, "Q5_1", 32, 24, &UnpackQ5_1},
    {8, "Q8_0", 32, 34, &UnpackQ8_0},
    {10, "Q2_K", kSuperBlock, 84, &UnpackQ2_K},
    {11, "Q3_K", kSuperBlock, 110, &UnpackQ3_K},
    {12, "Q4_K", kSuperBlock, 144, &UnpackQ4_K},
    {13, "Q5_K", kSuperBlock, 176, &UnpackQ5_K},
    {14, "Q6_K", kSuperBlock, 210, &UnpackQ6_K},
    {20, "IQ4_NL", 32, 18, &UnpackIq4Nl},
    {23, "IQ4_XS", kSuperBlock, 136, &UnpackIq4Xs},
    {30, "BF16", 1, 2, &UnpackBf16},
}};

struct UnservedType {
  uint32_t id = 0;
  std::string_view name;
};
constexpr std::array<UnservedType, 18> kUnserved = {{
    {9, "Q8_1"},
    {15, "Q8_K"},
    {16, "IQ2_XXS"},
    {17, "IQ2_XS"},
    {18, "IQ3_XXS"},
    {19, "IQ1_S"},
    {21, "IQ3_S"},
    {22, "IQ2_S"},
    {24, "I8"},
    {25, "I16"},
    {26, "I32"},
    {27, "I64"},
    {28, "F64"},
    {29, "IQ1_M"},
    {34, "TQ1_0"},
    {35, "TQ2_0"},
    {39, "MXFP4"},
    {40, "NVFP4"},
}};

}  // namespace

const GgmlType* FindGgmlType(uint32_t id) {
  for (const GgmlType& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

std::string_view UnservedGgmlTypeName(uint32_t id) {
  for (const UnservedType& type : kUnserved) {
    if (type.id == id) return type.name;
  }
  return {};
}

std::string ServedGgmlTypes() {
  return absl::StrJoin(
      kTypes, ", ",
      [](std::string* out, const GgmlType& type) { out->append(type.name); });
}

}  // namespace kvasir::model
