// Collective operations of a warp's lanes, such as shuffles. Each lane stores
// its operands; the lane that arrives last computes the results of all lanes.
#include <cmath>

#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {
namespace {

Fiber& LaneFiber(uint32_t lane) { return current_fiber->warp->lanes[lane]; }

// Returns the rendezvous object at which the lanes in `mask` wait for each
// other.
Meet& MeetOf(uint32_t mask) {
  Fiber& self = *current_fiber;
  if ((mask >> self.lane & 1) == 0) {
    Fault("lane %u is not in the mask %08x that it passes", self.lane, mask);
  }
  Warp& warp = *self.warp;
  Meet* free = nullptr;
  for (Meet& meet : warp.meets) {
    if (meet.mask == mask) return meet;
    if (meet.arrived == 0 && (free == nullptr || meet.mask == 0)) free = &meet;
  }
  if (free == nullptr) {
    Fault("lanes of the warp wait with more than %d different masks",
          Warp::kMasks);
  }
  free->mask = mask;
  free->lanes = static_cast<uint32_t>(__builtin_popcount(mask));
  return *free;
}

void Meeting(uint32_t mask, bool orders, void (*finish)(void*), void* context) {
  Meet& meet = MeetOf(mask);
  Arrive(meet, {meet.lanes, /*waits=*/true, orders, /*same_site=*/true,
                /*barrier=*/nullptr, finish, context});
}

float FloatOf32(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
uint32_t BitsOf32(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

double Half(MmaKind kind, uint32_t pair, int high) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * high));
  return static_cast<double>(kind == MmaKind::kBf16 ? ToFloat(Bf16{bits})
                                                    : ToFloat(F16{bits}));
}

// Computes d += a b in float64. Each product of two numbers is exact, and the
// products are added in the order of k. So the bits are the same for any
// instruction set of the host.
struct Product {
  using Part = double __attribute__((vector_size(4 * sizeof(double))));
  static constexpr int kParts = 2;  // Parts per matrix row
  double a[16][16];
  Part b[16][kParts], d[16][kParts];
};

__attribute__((always_inline)) inline void MultiplyAs(Product& product) {
  for (int row = 0; row < 16; ++row) {
    Product::Part first = product.d[row][0], second = product.d[row][1];
    for (int k = 0; k < 16; ++k) {
      first += product.a[row][k] * product.b[k][0];
      second += product.a[row][k] * product.b[k][1];
    }
    product.d[row][0] = first;
    product.d[row][1] = second;
  }
}
__attribute__((target("avx2"))) void MultiplyByAvx2(Product& product) {
  MultiplyAs(product);
}
void MultiplyByAny(Product& product) { MultiplyAs(product); }

// simt/mma.h documents which elements each lane holds.
void Multiply(MmaKind kind) {
  Product product;
  auto* const b = reinterpret_cast<double*>(product.b);  // [16][8]
  auto* const d = reinterpret_cast<double*>(product.d);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const Fiber& fiber = LaneFiber(lane);
    const uint32_t g = lane / 4, c = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) {
      double* const of_a = &product.a[g + 8 * (i % 2)][2 * c + 8 * (i / 2)];
      of_a[0] = Half(kind, fiber.given[i], 0);
      of_a[1] = Half(kind, fiber.given[i], 1);
      d[8 * (g + 8 * (i / 2)) + 2 * c + i % 2] =
          static_cast<double>(FloatOf32(fiber.got[i]));
    }
    for (uint32_t i = 0; i < 2; ++i) {
      b[8 * (2 * c + 8 * i) + g] = Half(kind, fiber.given[4 + i], 0);
      b[8 * (2 * c + 8 * i + 1) + g] = Half(kind, fiber.given[4 + i], 1);
    }
  }
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) {
    MultiplyByAvx2(product);
  } else {
    MultiplyByAny(product);
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    Fiber& fiber = LaneFiber(lane);
    const uint32_t g = lane / 4, c = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) {
      fiber.got[i] = BitsOf32(
          static_cast<float>(d[8 * (g + 8 * (i / 2)) + 2 * c + i % 2]));
    }
  }
}

// Computes d += a b for bytes, exactly. Reports a sum that does not fit into 32
// bits.
void MultiplyBytes(bool signed_a) {
  int32_t a[16][32], b[8][32];
  const auto byte = [](uint32_t word, uint32_t i, bool is_signed) -> int32_t {
    const auto bits = static_cast<uint8_t>(word >> (8 * i));
    return is_signed ? static_cast<int8_t>(bits) : bits;
  };
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t* const given = LaneFiber(lane).given;
    const uint32_t g = lane / 4, c = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) {
      for (uint32_t j = 0; j < 4; ++j) {
        a[g + 8 * (i % 2)][4 * c + 16 * (i / 2) + j] =
            byte(given[i], j, signed_a);
        if (i < 2) b[g][4 * c + 16 * i + j] = byte(given[4 + i], j, true);
      }
    }
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    Fiber& fiber = LaneFiber(lane);
    const uint32_t g = lane / 4, c = lane % 4;
    for (uint32_t i = 0; i < 4; ++i) {
      int32_t sum = 0;  // at most 32 * 255 * 128
      for (uint32_t k = 0; k < 32; ++k) {
        sum += a[g + 8 * (i / 2)][k] * b[2 * c + i % 2][k];
      }
      const int64_t total = int64_t{static_cast<int32_t>(fiber.got[i])} + sum;
      if (total != static_cast<int32_t>(total)) {
        Fault("the sum %lld of products does not fit into 32 bits",
              static_cast<long long>(total));
      }
      fiber.got[i] = static_cast<uint32_t>(static_cast<int32_t>(total));
    }
  }
}

struct Matrices {
  int count;
  bool transposed;
};

// Computes the results of LoadMatrices. Before this, each lane has read the
// four words of its matrix row and stored them as its operands.
void Distribute(const Matrices& matrices) {
  const auto half = [](uint32_t matrix, uint32_t row, uint32_t column) {
    const uint32_t word = LaneFiber(8 * matrix + row).given[column / 2];
    return word >> (16 * (column % 2)) & 0xffffu;
  };
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t g = lane / 4, c = lane % 4;
    for (uint32_t m = 0; m < static_cast<uint32_t>(matrices.count); ++m) {
      const uint32_t low =
          matrices.transposed ? half(m, 2 * c, g) : half(m, g, 2 * c);
      const uint32_t high =
          matrices.transposed ? half(m, 2 * c + 1, g) : half(m, g, 2 * c + 1);
      LaneFiber(lane).got[m] = low | high << 16;
    }
  }
}

}  // namespace

void SyncWarp(uint32_t mask, Site site) {
  Enter("SyncWarp", site);
  if (LeftOut()) return;
  Fiber& self = *current_fiber;
  Meeting(
      mask, /*orders=*/true,
      [](void* context) {
        const auto& fiber = *static_cast<const Fiber*>(context);
        FlushRequests(*fiber.cta, fiber.place.thread / kLanes);
      },
      &self);
}

uint32_t Shuffle(ShuffleKind kind, uint32_t mask, uint32_t value,
                 uint32_t operand, Site site) {
  static constexpr const char* kNames[] = {"ShuffleXor", "ShuffleFrom",
                                           "ShuffleUp", "ShuffleDown"};
  Enter(kNames[static_cast<int>(kind)], site);
  Fiber& self = *current_fiber;
  const uint32_t lane = self.lane;
  if (kind != ShuffleKind::kFrom && operand >= kLanes) {
    Fault("the value comes from %u lanes away, but a warp has only %u lanes",
          operand, kLanes);
  }
  uint32_t from = 0;
  switch (kind) {
    case ShuffleKind::kXor:
      from = lane ^ operand;
      break;
    case ShuffleKind::kFrom:
      from = operand % kLanes;
      break;
    case ShuffleKind::kUp:
      // If operand > lane, the difference wraps around to an invalid lane.
      from = lane - operand;
      break;
    case ShuffleKind::kDown:
      from = lane + operand;
      break;
  }
  self.given[0] = value;
  self.given[1] = from < kLanes ? from : lane;
  Meeting(
      mask, /*orders=*/false,
      [](void* context) {
        const uint32_t lanes = *static_cast<const uint32_t*>(context);
        for (uint32_t to = 0; to < kLanes; ++to) {
          if ((lanes >> to & 1) == 0) continue;
          Fiber& fiber = LaneFiber(to);
          const uint32_t source = fiber.given[1];
          fiber.got[0] = (lanes >> source & 1) != 0 ? LaneFiber(source).given[0]
                                                    : 0xffffffffu;
        }
      },
      &mask);
  return self.got[0];
}

uint32_t Ballot(bool yes, uint32_t mask, Site site) {
  Enter("Ballot", site);
  Fiber& self = *current_fiber;
  self.given[0] = yes;
  Meeting(
      mask, /*orders=*/false,
      [](void* context) {
        const uint32_t lanes = *static_cast<const uint32_t*>(context);
        uint32_t votes = 0;
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          if ((lanes >> lane & 1) != 0 && LaneFiber(lane).given[0] != 0) {
            votes |= 1u << lane;
          }
        }
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          if ((lanes >> lane & 1) != 0) LaneFiber(lane).got[0] = votes;
        }
      },
      &mask);
  return self.got[0];
}

void Mma(MmaKind kind, float (&d)[4], const uint32_t (&a)[4],
         const uint32_t (&b)[2], Site site) {
  Enter(kind == MmaKind::kBf16 ? "MmaBf16" : "MmaF16", site);
  Fiber& self = *current_fiber;
  for (int i = 0; i < 4; ++i) self.given[i] = a[i];
  for (int i = 0; i < 2; ++i) self.given[4 + i] = b[i];
  for (int i = 0; i < 4; ++i) self.got[i] = BitsOf32(d[i]);
  Meeting(
      ~0u, /*orders=*/false,
      [](void* context) { Multiply(*static_cast<const MmaKind*>(context)); },
      &kind);
  for (int i = 0; i < 4; ++i) d[i] = FloatOf32(self.got[i]);
}

void MmaBytes(bool signed_a, int32_t (&d)[4], const uint32_t (&a)[4],
              const uint32_t (&b)[2], Site site) {
  Enter(signed_a ? "MmaS8" : "MmaU8", site);
  Fiber& self = *current_fiber;
  for (int i = 0; i < 4; ++i) self.given[i] = a[i];
  for (int i = 0; i < 2; ++i) self.given[4 + i] = b[i];
  for (int i = 0; i < 4; ++i) self.got[i] = static_cast<uint32_t>(d[i]);
  Meeting(
      ~0u, /*orders=*/false,
      [](void* context) { MultiplyBytes(*static_cast<const bool*>(context)); },
      &signed_a);
  for (int i = 0; i < 4; ++i) d[i] = static_cast<int32_t>(self.got[i]);
}

void LoadMatrices(uint32_t* words, int count, bool transposed, const void* row,
                  Site site) {
  Enter("LoadMatrices", site);
  Fiber& self = *current_fiber;
  if (self.lane < static_cast<uint32_t>(8 * count)) {
    CheckAligned(row, 16);
    CheckSharedRange(row, 16);
    CountAccess(row, 16, /*shared=*/true, /*stores=*/false);
    tsan::Read(row, 16);
    const auto* const from = static_cast<const volatile uint32_t*>(row);
    for (int i = 0; i < 4; ++i) self.given[i] = from[i];
  }
  Matrices matrices = {count, transposed};
  Meeting(
      ~0u, /*orders=*/false,
      [](void* context) { Distribute(*static_cast<const Matrices*>(context)); },
      &matrices);
  for (int i = 0; i < count; ++i) words[i] = self.got[i];
}

uint32_t PickBytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> (4 * i) & 0xfu;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (which & 7))) & 0xffu;
    if ((which & 8) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    picked |= byte << (8 * i);
  }
  return picked;
}

namespace {

// Returns a + b "rounded to odd": if float64 cannot hold the sum exactly, the
// result is the neighbour whose last bit is 1. Rounding it to a narrower type
// then equals rounding the exact sum.
double OddSum(double a, double b) {
  const double sum = a + b;
  const double of_b = sum - a;
  const double rest = (a - (sum - of_b)) + (b - of_b);
  uint64_t bits;
  __builtin_memcpy(&bits, &sum, sizeof(bits));
  if (rest == 0.0 || !std::isfinite(sum) || (bits & 1) != 0) return sum;
  return std::nextafter(sum, rest > 0.0 ? INFINITY : -INFINITY);
}
float OddFloat(double value) {
  const auto near = static_cast<float>(value);
  const double rest = value - static_cast<double>(near);
  if (rest == 0.0 || !std::isfinite(near) || (BitsOf32(near) & 1) != 0) {
    return near;
  }
  return std::nextafter(near, rest > 0.0 ? INFINITY : -INFINITY);
}

template <typename T>
uint32_t FmaOf(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    const auto part = [i](uint32_t pair) {
      const T number = {static_cast<uint16_t>(pair >> (16 * i))};
      return static_cast<double>(ToFloat(number));
    };
    // The product is exact in float64.
    const double sum = OddSum(part(a) * part(b), part(c));
    result |= static_cast<uint32_t>(FromFloat<T>(OddFloat(sum)).bits)
              << (16 * i);
  }
  return result;
}

}  // namespace

uint32_t FmaPair(DType dtype, uint32_t a, uint32_t b, uint32_t c) {
  return dtype == DType::kBf16 ? FmaOf<Bf16>(a, b, c) : FmaOf<F16>(a, b, c);
}

}  // namespace kvasir::kernels::emulation
