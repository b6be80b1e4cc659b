// Compares each primitive of kernels/simt with plain C++ code.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/emulation/testing/mma_ceiling.h"
#include "kernels/emulation/testing/primitive_kernels.h"

namespace kvasir::kernels::emulation {
namespace {

using emulated::PrimitiveArgs;
using Words = std::vector<uint32_t>;

const uint64_t kSeeds = Seeds();

Words RandomWords(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  Words words(count);
  for (uint32_t& word : words) word = static_cast<uint32_t>(engine());
  return words;
}
uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }
float Number(uint32_t bits) { return std::bit_cast<float>(bits); }

// The arguments of a kernel, with the memory of its buffers `in`, `out` and
// `more`.
struct Kernel {
  Kernel(EmulatedTest& test, const Words& in, size_t out_words,
         size_t more_words = 1)
      : of(&test),
        in_memory(test.Put(in)),
        out_memory(test.Put(Words(out_words, 0))),
        more_memory(test.Put(Words(more_words, 0))) {
    args.in = in_memory.as<uint32_t>().device_address();
    args.out = out_memory.as<uint32_t>().device_address();
    args.more = more_memory.as<uint32_t>().device_address();
  }
  Words Out() { return of->Get<uint32_t>(out_memory); }
  Words More() { return of->Get<uint32_t>(more_memory); }

  EmulatedTest* of;
  DeviceBuffer in_memory, out_memory, more_memory;
  PrimitiveArgs args;
};

TEST(PrimitivesTest, EveryThreadHasItsIndicesInTheGrid) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, {0}, size_t{3} * 2 * 64);
    LaunchIndices(run.args, 3, 2, 64, test.launcher());
    const Words out = run.Out();
    for (uint32_t y = 0; y < 2; ++y) {
      for (uint32_t x = 0; x < 3; ++x) {
        for (uint32_t t = 0; t < 64; ++t) {
          EXPECT_EQ(out[(y * 3 + x) * 64 + t],
                    t | x << 10 | y << 20 | 3u << 26);
        }
      }
    }
  }
}

TEST(PrimitivesTest, LanesOfAWarpExchangeValues) {
  Words in(32);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    in[lane] = Bits(static_cast<float>(lane * lane % 37) - 11.0f) | (lane == 3);
  }
  uint32_t odd = 0;
  float most = -INFINITY;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    odd |= in[lane] % 2 << lane;
    most = std::max(most, Number(in[lane]));
  }
  ASSERT_EQ(odd, 8u);
  // Adds the lanes in the same order as WarpSum: first lanes that are 16 apart,
  // then lanes that are 8, 4, 2 and 1 apart.
  std::vector<float> sums(32);
  for (size_t i = 0; i < 32; ++i) sums[i] = Number(in[i]);
  for (size_t lanes = 16; lanes > 0; lanes /= 2) {
    for (size_t i = 0; i < lanes; ++i) sums[i] += sums[i + lanes];
  }
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, in, size_t{32} * 16);
    LaunchWarp(run.args, test.launcher());
    const Words out = run.Out();
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t* const got = &out[size_t{16} * lane];
      EXPECT_EQ(got[0], in[lane ^ 5]);
      EXPECT_EQ(got[1], in[7]);
      EXPECT_EQ(got[2], in[lane < 3 ? lane : lane - 3]);
      EXPECT_EQ(got[3], in[lane > 27 ? lane : lane + 4]);
      EXPECT_EQ(got[4], in[lane ^ 1]);
      EXPECT_EQ(got[5], odd);
      EXPECT_EQ(got[6], 1u);
      EXPECT_EQ(got[7], 0u);
      EXPECT_EQ(Number(got[8]), sums[0]);
      EXPECT_EQ(Number(got[9]), most);
    }
  }
}

// The inputs include zeros of both signs and NaN, which lanes compare in
// different orders.
TEST(PrimitivesTest, MaximaHaveTheSameBitsInEveryLane) {
  constexpr uint32_t kMinusZero = 0x80000000u, kNan = 0x7fc12345u;
  constexpr uint32_t kMinusNan = 0xffc00001u;
  struct Case {
    uint32_t all, others, want;
  };
  for (const Case& c :
       {Case{kMinusZero, 0, 0}, Case{Bits(-1.0f), kMinusZero, kMinusZero},
        Case{kNan, Bits(-2.0f), Bits(-2.0f)},
        Case{Bits(-INFINITY), kMinusNan, Bits(-INFINITY)},
        Case{kNan, kMinusNan, 0x7fffffffu}}) {
    Words in(32, c.all);
    for (const size_t lane : {0, 3, 5}) in[lane] = c.others;
    EmulatedTest test;
    Kernel run(test, in, 64);
    LaunchMaxima(run.args, test.launcher());
    const Words out = run.Out();
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const uint32_t of_nans = c.all == kNan ? 0x7fffffffu : c.all;
      EXPECT_EQ(out[2 * lane], lane < 6 ? c.want : of_nans) << lane;
      EXPECT_EQ(out[2 * lane + 1], c.want) << lane;
    }
  }
}

TEST(PrimitivesTest, NamedBarriersOrderTwoWarpsInBothDirections) {
  const Words in = RandomWords(64, 1);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, in, 64);
    LaunchBarriers(run.args, test.launcher());
    Words want = in;
    std::rotate(want.begin(), want.begin() + 32, want.end());
    EXPECT_EQ(run.Out(), want);
  }
}

TEST(PrimitivesTest, AsyncCopiesOfEveryWidthArrive) {
  const Words in = RandomWords(224, 2);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, in, 224);
    LaunchCopies(run.args, test.launcher());
    EXPECT_EQ(run.Out(), in);
  }
}

TEST(PrimitivesTest, BulkCopiesHaveArrivedWhenTheirBarriersPhaseEnds) {
  if (!HasBulkCopies()) GTEST_SKIP() << "bulk copies need sm_90";
  for (const uint32_t tiles : {1u, 2u, 5u}) {
    const Words in = RandomWords(size_t{256} * tiles, tiles);
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      Kernel run(test, in, in.size());
      run.args.count = tiles;
      LaunchBulkCopies(run.args, test.launcher());
      EXPECT_EQ(run.Out(), in);
    }
  }
}

// Checks LaunchMma: each element must be A B + 1, computed in float64 and
// rounded to float32.
template <typename T>
void ExpectProduct(bool bf16) {
  const std::vector<float> numbers = RandomFloats(16 * 16 + 8 * 16, 3);
  Words in(numbers.size() / 2);
  std::vector<double> stored(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const T number = FromFloat<T>(numbers[i]);
    in[i / 2] |= static_cast<uint32_t>(number.bits) << (16 * (i % 2));
    stored[i] = static_cast<double>(ToFloat(number));
  }
  EmulatedTest test;
  Kernel run(test, in, size_t{16} * 8);
  LaunchMma(run.args, bf16, test.launcher());
  const Words out = run.Out();
  for (size_t m = 0; m < 16; ++m) {
    for (size_t n = 0; n < 8; ++n) {
      double want = 1.0;
      for (size_t k = 0; k < 16; ++k) {
        want += stored[m * 16 + k] * stored[256 + n * 16 + k];
      }
      // A GPU may add the products in another order, so its result has a
      // tolerance.
      EXPECT_NEAR(Number(out[m * 8 + n]), static_cast<float>(want),
                  OnGpu() ? 1e-4f : 0.0f);
    }
  }
}

TEST(PrimitivesTest, MmaComputesTheProduct) {
  ExpectProduct<Bf16>(true);
  ExpectProduct<F16>(false);
}

TEST(PrimitivesTest, AProductOfBytesIsExactForSignedAndUnsignedBytes) {
  Words in = RandomWords(128 + 64, 5);
  // The first row and the first column have bytes of the greatest magnitude.
  for (size_t k = 0; k < 8; ++k) in[k] = 0xffffffffu;
  for (size_t k = 0; k < 8; ++k) in[128 + k] = 0x80808080u;
  const auto byte = [&](size_t i) {
    return static_cast<uint8_t>(in[i / 4] >> (8 * (i % 4)));
  };
  for (const bool signed_a : {false, true}) {
    EmulatedTest test;
    Kernel run(test, in, size_t{16} * 8);
    LaunchMmaBytes(run.args, signed_a, test.launcher());
    const Words out = run.Out();
    for (size_t m = 0; m < 16; ++m) {
      for (size_t n = 0; n < 8; ++n) {
        auto want = static_cast<int32_t>(1 + n % 2 + 2 * (m / 8));
        for (size_t k = 0; k < 32; ++k) {
          const uint8_t a = byte(m * 32 + k);
          want += (signed_a ? static_cast<int8_t>(a) : a) *
                  static_cast<int8_t>(byte(512 + n * 32 + k));
        }
        EXPECT_EQ(static_cast<int32_t>(out[m * 8 + n]), want) << m << " " << n;
      }
    }
  }
}

TEST(PrimitivesTest, TheMmaCeilingKernelComputesAllItsProducts) {
  const auto sums = [](uint32_t steps, double* operations) {
    EmulatedTest test;
    const int multiprocessors = test.launcher().multiprocessors();
    const DeviceBuffer out = test.Memory(sizeof(float) * kMmaCeilingThreads *
                                         size_t(multiprocessors));
    *operations = KVASIR_PRIMITIVES_TARGET::LaunchMmaCeiling(
        {out.as<float>().device_address(), steps}, test.launcher());
    *operations /= multiprocessors;
    return test.Get<float>(out);
  };
  double operations = 0.0;
  const std::vector<float> one = sums(1, &operations);
  EXPECT_EQ(operations, 16.0 * 8 * 4096);
  const std::vector<float> three = sums(3, &operations);
  EXPECT_EQ(operations, 3 * 16.0 * 8 * 4096);
  ASSERT_EQ(one.size(), three.size());
  std::set<float> seen;
  for (size_t i = 0; i < one.size(); ++i) {
    // The factors are multiples of 1/4, so the sums of their products
    // are exact.
    EXPECT_EQ(three[i], 3 * one[i]);
    seen.insert(one[i]);
  }
  EXPECT_GT(seen.size(), 16u);
}

// Tests that a product with a factor 0 does not change the bits of a sum in an
// mma. The prefill kernel multiplies slots that a row cannot see by a weight of
// 0. The decoding kernel may leave out such products, and must give the same
// bits (attention/cuda/prefill_attention-inl.h).
constexpr size_t kMmaRows = 16, kMmaColumns = 8, kMmaDepth = 16;
template <typename T>
class MmaOfZerosTest : public ::testing::Test {
 protected:
  struct Operands {
    std::vector<T> a = std::vector<T>(kMmaRows * kMmaDepth);
    std::vector<T> b =
        std::vector<T>(kMmaColumns * kMmaDepth);  // one column after another
  };
  using Chain = std::vector<Operands>;

  T Random() {
    // Magnitudes differ widely, so that each sum is rounded.
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-5, 5);
    return FromFloat<T>(std::ldexp(normal(engine_), exponent(engine_)));
  }
  // Returns a random finite number, which may be very large or very small.
  T AnyFinite() {
    constexpr auto kMost = static_cast<uint16_t>(
        DTypeOf<T>::kValue == DType::kBf16 ? 0x7f7f : 0x7bff);
    for (;;) {
      const auto word = static_cast<uint32_t>(engine_());
      const auto sign = static_cast<uint16_t>(word & 0x8000);
      const auto size = static_cast<uint16_t>(word & 0x7fff);
      if (word >> 16 & 1) return {static_cast<uint16_t>(sign | kMost)};
      if (word >> 17 & 1) return {static_cast<uint16_t>(sign | 1)};
      if (size <= kMost) return {static_cast<uint16_t>(sign | size)};
    }
  }
  Operands RandomOperands() {
    Operands operands;
    for (T& number : operands.a) number = Random();
    for (T& number : operands.b) number = Random();
    return operands;
  }
  Chain RandomChain(size_t count) {
    Chain chain(count);
    for (Operands& operands : chain) operands = RandomOperands();
    return chain;
  }

  // Returns the bits of the sums of all products, [16, 8].
  static Words Run(const Chain& chain) {
    Words in;
    for (const Operands& operands : chain) {
      for (const auto* const side : {&operands.a, &operands.b}) {
        for (size_t i = 0; i < side->size(); i += 2) {
          in.push_back((*side)[i].bits | uint32_t{(*side)[i + 1].bits} << 16);
        }
      }
    }
    EmulatedTest test;
    Kernel run(test, in, kMmaRows * kMmaColumns);
    run.args.count = static_cast<uint32_t>(chain.size());
    LaunchMmaChain(run.args, DTypeOf<T>::kValue == DType::kBf16,
                   test.launcher());
    return run.Out();
  }
  static Words Column(const Words& sums, size_t column) {
    Words words;
    for (size_t m = 0; m < kMmaRows; ++m) {
      words.push_back(sums[m * kMmaColumns + column]);
    }
    return words;
  }

  std::mt19937 engine_{17};
};
using SixteenBits = ::testing::Types<Bf16, F16>;
TYPED_TEST_SUITE(MmaOfZerosTest, SixteenBits);

TYPED_TEST(MmaOfZerosTest, AMatrixProductWithZerosDoesNotChangeTheSums) {
  const auto chain = this->RandomChain(6);
  const Words want = this->Run(chain);
  for (int turn = 0; turn < 12; ++turn) {
    // Depending on `turn`, A is zero, B is zero, or both are.
    typename TestFixture::Operands zeros;
    for (TypeParam& number : zeros.a) {
      if (turn % 3 == 1) number = this->AnyFinite();
    }
    for (TypeParam& number : zeros.b) {
      if (turn % 3 == 0) number = this->AnyFinite();
    }
    for (size_t at = 0; at <= chain.size(); ++at) {
      auto longer = chain;
      longer.insert(longer.begin() + static_cast<int64_t>(at), zeros);
      EXPECT_EQ(this->Run(longer), want) << turn << " at " << at;
    }
  }
}

// The columns of B have zeros at different places; one column has only zeros.
TYPED_TEST(MmaOfZerosTest, AFactorThatIsMultipliedByZeroDoesNotChangeTheSums) {
  for (int turn = 0; turn < 4; ++turn) {
    auto chain = this->RandomChain(5);
    std::vector<std::vector<bool>> is_zero;  // [product][column, k]
    for (auto& operands : chain) {
      is_zero.emplace_back(kMmaColumns * kMmaDepth);
      for (size_t i = 0; i < kMmaColumns * kMmaDepth; ++i) {
        const size_t column = i / kMmaDepth;
        const bool zero =
            column == 7 ||
            (column == 6 ? i % kMmaDepth >= 5
                         : this->engine_() % kMmaColumns <= column);
        is_zero.back()[i] = zero;
        if (zero) operands.b[i] = TypeParam{};
      }
    }
    for (size_t column = 0; column < kMmaColumns; ++column) {
      // Replaces the numbers of A that are multiplied by a zero of this column
      // of B, by zeros or by any numbers. The column's sums must stay the same.
      const auto beside = [&](bool zeros) {
        auto other = chain;
        for (size_t i = 0; i < other.size(); ++i) {
          for (size_t at = 0; at < other[i].a.size(); ++at) {
            if (!is_zero[i][column * kMmaDepth + at % kMmaDepth]) continue;
            other[i].a[at] = zeros ? TypeParam{} : this->AnyFinite();
          }
        }
        return this->Column(this->Run(other), column);
      };
      const Words want = beside(true);
      for (int other = 0; other < 6; ++other) {
        EXPECT_EQ(beside(false), want) << "column " << column;
      }
      EXPECT_EQ(this->Column(this->Run(chain), column), want);
      if (column == 7) {
        EXPECT_EQ(want, Words(kMmaRows, 0));
      }
    }
  }
}

TYPED_TEST(MmaOfZerosTest, AProductAmongZerosGivesTheSameSumAtEveryIndex) {
  const auto before = this->RandomChain(2);
  const auto numbers = this->RandomOperands();
  Words first;
  for (size_t place = 0; place < kMmaDepth; ++place) {
    auto chain = before;
    auto& alone = chain.emplace_back();
    for (TypeParam& number : alone.a) number = this->AnyFinite();
    for (size_t m = 0; m < kMmaRows; ++m) {
      alone.a[m * kMmaDepth + place] = numbers.a[m];
    }
    for (size_t n = 0; n < kMmaColumns; ++n) {
      alone.b[n * kMmaDepth + place] = numbers.b[n];
    }
    const Words sums = this->Run(chain);
    if (place == 0) first = sums;
    EXPECT_EQ(sums, first) << place;
  }
}

// The index of a row in its tile depends on how a prompt is cut into chunks, so
// the row's sums must not depend on this index.
TYPED_TEST(MmaOfZerosTest, ARowHasTheSameSumsAtEveryIndexInATile) {
  const auto chain = this->RandomChain(4);
  const Words want = this->Run(chain);
  for (size_t turn = 1; turn < kMmaRows; ++turn) {
    auto turned = chain;
    for (auto& operands : turned) {
      std::rotate(operands.a.begin(),
                  operands.a.begin() + static_cast<int64_t>(turn * kMmaDepth),
                  operands.a.end());
    }
    Words sums = this->Run(turned);
    std::rotate(sums.begin(),
                sums.end() - static_cast<int64_t>(turn * kMmaColumns),
                sums.end());
    EXPECT_EQ(sums, want) << turn;
  }
}

// Returns the words that LaunchMatrices must give: for one, two and four
// matrices, then for the same matrices transposed.
Words Fragments(const Words& matrices) {
  const auto at = [&](uint32_t matrix, uint32_t row, uint32_t column) {
    const uint32_t word = matrices[matrix * 32 + row * 4 + column / 2];
    return word >> (16 * (column % 2)) & 0xffffu;
  };
  Words words;
  for (const bool transposed : {false, true}) {
    for (const uint32_t count : {1u, 2u, 4u}) {
      for (uint32_t lane = 0; lane < 32; ++lane) {
        const uint32_t g = lane / 4, c = 2 * (lane % 4);
        for (uint32_t m = 0; m < count; ++m) {
          words.push_back(transposed ? at(m, c, g) | at(m, c + 1, g) << 16
                                     : at(m, g, c) | at(m, g, c + 1) << 16);
        }
      }
    }
  }
  return words;
}

TEST(PrimitivesTest, LoadMatricesGivesTheFragmentsOfMma) {
  const Words in = RandomWords(128, 4);
  const Words want = Fragments(in);
  EmulatedTest test;
  Kernel run(test, in, want.size());
  LaunchMatrices(run.args, test.launcher());
  EXPECT_EQ(run.Out(), want);
}

TEST(PrimitivesTest, AtomicsOfManyCtasAddUp) {
  constexpr uint32_t kCtas = 11;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, {0}, 6, kCtas);
    LaunchAtomics(run.args, kCtas, test.launcher());
    const Words out = run.Out();
    EXPECT_EQ(out[0], 64 * kCtas);
    EXPECT_EQ(Number(out[1]), 32.0f * kCtas);
    EXPECT_EQ(out[2], 64 * kCtas - 1);
    EXPECT_EQ(out[3], 64 * kCtas);
    EXPECT_EQ(out[4] + (uint64_t{out[5]} << 32),
              uint64_t{0x80000001} * 64 * kCtas);
    EXPECT_EQ(run.More(), Words(kCtas, 64));
  }
}

TEST(PrimitivesTest, AnAcquireSeesWhatWasWrittenBeforeTheReleaseThatItReads) {
  const Words in = RandomWords(64, 5);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    Kernel run(test, in, 64, 16 + 64);
    LaunchHandOver(run.args, test.launcher());
    EXPECT_EQ(run.Out(), in);
  }
}

template <typename T>
T Part(uint32_t pair, int i) {
  return {static_cast<uint16_t>(pair >> (16 * i))};
}
// True if `got` is the 16-bit number nearest to a b + c, with ties to even.
template <typename T>
bool IsNearest(T got, double a, double b, double c) {
  const auto distance = [&](T number) {
    return std::abs(static_cast<long double>(ToFloat(number)) -
                    (static_cast<long double>(a) * b + c));
  };
  const T below = {static_cast<uint16_t>(got.bits - 1)};
  const T above = {static_cast<uint16_t>(got.bits + 1)};
  for (const T other : {below, above}) {
    if (!std::isfinite(ToFloat(other))) continue;
    if (distance(other) < distance(got)) return false;
    if (distance(other) == distance(got) && got.bits % 2 == 1) return false;
  }
  return true;
}

// Checks operations on pairs with finite operands of similar size. If sizes
// differed much, a sum would only copy one operand.
template <typename T>
void ExpectPairs(int at) {
  constexpr uint32_t kCount = 300;
  const std::vector<float> numbers = RandomFloats(int64_t{6} * kCount, 6);
  Words in(size_t{3} * kCount);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const float scale = i / 2 % 9 == 8 ? 0x1p-9f : 1.0f;
    in[i / 2] |= static_cast<uint32_t>(FromFloat<T>(numbers[i] * scale).bits)
                 << (16 * (i % 2));
  }
  EmulatedTest test;
  Kernel run(test, in, size_t{kCount} * emulated::kNumberWords);
  run.args.count = kCount;
  LaunchNumbers(run.args, test.launcher());
  const Words out = run.Out();
  for (size_t i = 0; i < kCount; ++i) {
    const uint32_t* const got =
        &out[i * emulated::kNumberWords + static_cast<size_t>(at)];
    for (int half = 0; half < 2; ++half) {
      const auto a = static_cast<double>(ToFloat(Part<T>(in[3 * i], half)));
      const auto b = static_cast<double>(ToFloat(Part<T>(in[3 * i + 1], half)));
      const auto c = static_cast<double>(ToFloat(Part<T>(in[3 * i + 2], half)));
      EXPECT_TRUE(IsNearest(Part<T>(got[0], half), a, b, c));
      EXPECT_TRUE(IsNearest(Part<T>(got[1], half), a, 1.0, b));
      EXPECT_TRUE(IsNearest(Part<T>(got[2], half), a, 1.0, -b));
      EXPECT_TRUE(IsNearest(Part<T>(got[3], half), a, b, 0.0));
      if (DTypeOf<T>::kValue != DType::kF16) continue;
      const uint32_t least = out[i * emulated::kNumberWords + 14];
      EXPECT_EQ(ToFloat(Part<T>(least, half)), std::min(a, b));
    }
  }
}

TEST(PrimitivesTest, ArithmeticOnPairsRoundsOnce) {
  ExpectPairs<Bf16>(0);
  ExpectPairs<F16>(4);
}

TEST(PrimitivesTest, MinPairPrefersANumberToNaN) {
  // The triples have 1 and NaN in both orders, infinities, and zeros.
  const Words triples = {0x7e003c00u, 0x3c007e00u, 0u,
                         0xfc007c00u, 0x7bff7bffu, 0u,
                         0x80000000u, 0x00008000u, 0u};
  EmulatedTest test;
  Kernel run(test, triples, size_t{3} * emulated::kNumberWords);
  run.args.count = 3;
  LaunchNumbers(run.args, test.launcher());
  const Words out = run.Out();
  EXPECT_EQ(out[14], 0x3c003c00u);
  EXPECT_EQ(out[14 + emulated::kNumberWords], 0xfc007bffu);
  EXPECT_EQ(out[14 + 2 * emulated::kNumberWords], 0x80008000u);
}

TEST(PrimitivesTest, PrimitivesThatComputeWithNumbersMatchTheirDefinitions) {
  const Words triples = {
      Bits(1.5f),
      Bits(2.0f),
      0x3210u,  // selects the bytes of a
      Bits(-3.3f),
      Bits(1e-5f),
      0x7654u,  // selects the bytes of b
      Bits(0.0f),
      Bits(1.0f),
      0xfedcu,  // selects the signs of b's bytes
      Bits(10.7f),
      Bits(0.1f),
      0x0624u,  //
      // 2^-127 is below the smallest normal number
      Bits(-127.0f),
      Bits(3.0f),
      0x8888u,
  };
  constexpr uint32_t kCount = 5;
  EmulatedTest test;
  Kernel run(test, triples, size_t{kCount} * emulated::kNumberWords);
  run.args.count = kCount;
  LaunchNumbers(run.args, test.launcher());
  const Words out = run.Out();
  for (size_t i = 0; i < kCount; ++i) {
    const uint32_t a = triples[3 * i], b = triples[3 * i + 1];
    const uint32_t c = triples[3 * i + 2];
    const uint32_t* const got = &out[i * emulated::kNumberWords];
    uint32_t bytes = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t which = c >> (4 * n) & 15;
      const uint32_t word = which % 8 < 4 ? a : b;
      const auto byte = static_cast<uint8_t>(word >> (8 * (which % 4)));
      const uint32_t picked = which < 8 ? byte : (byte >= 128 ? 255u : 0u);
      bytes |= picked << (8 * n);
    }
    EXPECT_EQ(got[8], bytes) << i;
    const float x = Number(a);
    EXPECT_EQ(Number(got[9]), ToFloat(ToBf16(x)));
    EXPECT_EQ(Number(got[10]), ToFloat(ToF16(x)));
    const float power = x < -126.0f ? 0.0f : std::exp2(x);
    // Exp2 is within half a unit in the last place in the emulator, and within
    // two on a GPU.
    EXPECT_NEAR(Number(got[11]), power, (OnGpu() ? 2.4e-7f : 1.3e-7f) * power);
    if (x >= 0.0f) {
      EXPECT_EQ(Number(got[12]), std::sqrt(x));
    }
    EXPECT_EQ(Number(got[13]), std::fma(x, Number(b), Number(c)));
  }
}

// Runs the kernel of LaunchGridSum and checks the sum.
struct GridSum {
  static constexpr uint32_t kCtas = 4;
  static constexpr uint32_t kCount = 64 * 3;

  bool operator()(EmulatedTest& test) const {
    Words in(size_t{kCtas} * kCount);
    for (size_t i = 0; i < in.size(); ++i) {
      in[i] = Bits(static_cast<float>(i % 101) - 40.0f);
    }
    // the numbers are integers, so the sum is exact in any order
    float want = 0.0f;
    for (const uint32_t word : in) want += Number(word);
    Kernel run(test, in, 1, 1 + kCtas);
    run.args.count = kCount;
    LaunchGridSum(run.args, kCtas, test.launcher());
    return Number(run.Out()[0]) == want;
  }
};

TEST(PrimitivesTest, AGridSumsTheNumbersThatItsCtasCopied) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    EXPECT_TRUE(GridSum()(test)) << seed;
  }
}

// True for synchronizing lines that only order memory accesses. If such a line
// is left out, only ThreadSanitizer notices it, because the emulator executes
// accesses in program order.
bool OnlyOrders(const SyncSite& site) {
  return site.kind == "Fence<kGpu>" || site.kind == "StoreAtomic<kRelease>" ||
         site.kind == "LoadAtomic<kAcquire>";
}

void ExpectEachSiteIsMissed(const std::string& kernel, size_t sites,
                            absl::FunctionRef<bool(EmulatedTest&)> is_right) {
  const std::vector<Mutant> mutants = LeaveOutEach(kernel, kSeeds, is_right);
  EXPECT_EQ(mutants.size(), sites) << kernel;
  for (const Mutant& mutant : mutants) {
    if (!kThreadSanitizer && OnlyOrders(mutant.site)) continue;
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << kernel << ": " << mutant.site.kind << " at " << mutant.site.file
        << ":" << mutant.site.line;
  }
}

TEST(LeaveOutTest, LeavingOutAnyOneBarrierOrWaitOfAPipelineIsDetected) {
  ExpectEachSiteIsMissed("grid_sum", 9, GridSum());
}

// Checks that a kernel's output is `want`, and that leaving out any one of its
// `sites` sites is detected.
void ExpectEchoMissesEachSite(const std::string& kernel, size_t sites,
                              void (*launch)(const PrimitiveArgs&, Launcher&),
                              const Words& in, const Words& want) {
  ExpectEachSiteIsMissed(kernel, sites, [&](EmulatedTest& test) {
    Kernel run(test, in, want.size(), 80);
    run.args.count = static_cast<uint32_t>(in.size() / 256);
    launch(run.args, test.launcher());
    return run.Out() == want;
  });
}

TEST(LeaveOutTest,
     LeavingOutAnySynchronizingLineOfAPrimitivesKernelIsDetected) {
  const Words in = RandomWords(64, 7);
  ExpectEchoMissesEachSite("hand_over", 4, &emulated::LaunchHandOver, in, in);
  Words turned = in;
  std::rotate(turned.begin(), turned.begin() + 32, turned.end());
  ExpectEchoMissesEachSite("barriers", 4, &emulated::LaunchBarriers, in,
                           turned);
  const Words more = RandomWords(224, 8);
  ExpectEchoMissesEachSite("copies", 6, &emulated::LaunchCopies, more, more);
  const Words tiles = RandomWords(size_t{5} * 256, 9);
  ExpectEchoMissesEachSite("bulk_copies", 4, &emulated::LaunchBulkCopies, tiles,
                           tiles);
  const Words matrices = RandomWords(128, 10);
  ExpectEchoMissesEachSite("matrices", 1, &emulated::LaunchMatrices, matrices,
                           Fragments(matrices));
}

}  // namespace
}  // namespace kvasir::kernels::emulation
