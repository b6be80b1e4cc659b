#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "kernels/latents/code_pack.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/append_parts.h"
#include "kernels/testing/op_test_util.h"
#include "nlohmann/json.hpp"

namespace kvasir::kernels {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

void AppendParts(TestStream& test, const Rows& rows,
                 const std::vector<KvAppendPart>& parts,
                 float* not_finite = nullptr) {
  const auto append = Prepare(
      test.device(),
      KvAppendShape{.row_stride = rows.stride, .page_tokens = rows.page_tokens},
      parts);
  KVASIR_EXPECT_OK(append.status());
  KVASIR_EXPECT_OK(
      KvAppend(test.stream(), *append,
               {OnDevice(rows.numbers.data()), OnDevice(rows.slots.data()),
                static_cast<int64_t>(rows.slots.size()), OnDevice(not_finite)},
               test.workspace()));
}

// Appends rows to memory of `part`. Returns how many codes were clamped.
int64_t Append(TestStream& test, const Rows& rows, LatentPartArgs part,
               std::vector<char>* memory, std::vector<float>* not_finite) {
  part.arena = memory->data();
  int64_t clamped = 0;
  not_finite->assign(rows.slots.size(), 0.0f);
  AppendParts(test, rows, {{0, OnDevice(part), OnDevice(&clamped)}},
              not_finite->data());
  return clamped;
}

struct Written {
  std::vector<char> memory;
  int64_t clamped = 0;
  std::vector<float> not_finite;  // one element per token
};

Written AppendOnAll(Part& part, const Rows& rows, int64_t pages) {
  Written truth{part.Memory(pages)};
  const auto reference = TestStream::InGranules(part.granule_bytes);
  truth.clamped =
      Append(*reference, rows, part.view, &truth.memory, &truth.not_finite);
  if (part.granule_bytes > 0) return truth;  // SIMD does not support granules
  TestStream two(2, CpuBackend::kSimd, 0);
  ForEachSimdTarget([&] {
    Written got{part.Memory(pages)};
    got.clamped = Append(two, rows, part.view, &got.memory, &got.not_finite);
    EXPECT_TRUE(truth.memory == got.memory);
    EXPECT_EQ(truth.clamped, got.clamped);
    EXPECT_EQ(truth.not_finite, got.not_finite);
  });
  return truth;
}

template <typename T>
float NumberAt(const char* address) {
  T number;
  std::memcpy(&number, address, sizeof(T));
  return ToFloat(number);
}

float NumberAt(DType dtype, const char* address) {
  return VisitDType(
      dtype, [&](auto type) { return NumberAt<decltype(type)>(address); });
}

class KvAppendTest : public ::testing::TestWithParam<DType> {};

TEST_P(KvAppendTest, WritesRoundedNumbersToTheirSlotsAndNothingElse) {
  Part part({{37, {}}, {24, {}}, {1, {}}}, GetParam(), 4);
  Rows rows = RandomRows(62, 4);
  rows.numbers[5] = std::numeric_limits<float>::quiet_NaN();
  rows.numbers[6] = 1e-7f;  // subnormal in float16
  rows.numbers[7] = -3e38f;
  const int64_t pages = 3;
  Written written = AppendOnAll(part, rows, pages);
  part.view.arena = written.memory.data();
  for (size_t t = 0; t < rows.slots.size(); ++t) {
    const int64_t slot = rows.slots[t];
    if (slot < 0) continue;
    for (int64_t g = 0; g < part.view.num_groups; ++g) {
      const LatentGroup& group = part.view.groups[g];
      for (int64_t c = 0; c < group.width; ++c) {
        const float x = rows.numbers[t * static_cast<size_t>(rows.stride) +
                                     static_cast<size_t>(group.column + c)];
        const float stored =
            NumberAt(GetParam(),
                     SlotAddress(part.view, group.codes, slot / 4, slot % 4) +
                         c * DTypeBytes(GetParam()));
        const float want = VisitDType(GetParam(), [&](auto type) {
          return ToFloat(FromFloat<decltype(type)>(x));
        });
        EXPECT_EQ(BitsOf(want), BitsOf(stored));
      }
    }
    part.Erase(slot, &written.memory);
  }
  EXPECT_TRUE(written.memory == part.Memory(pages));
}

// Checks that decoded codes differ from the numbers by at most half a
// quantization step, and that only the slots of the tokens are written.
void ExpectCodesOf(Part& part, const Rows& rows, bool static_ranges) {
  const int64_t pages = 3;
  Written written = AppendOnAll(part, rows, pages);
  part.view.arena = written.memory.data();
  int64_t clamped = 0;
  for (size_t t = 0; t < rows.slots.size(); ++t) {
    const int64_t slot = rows.slots[t];
    if (slot < 0) continue;
    for (int64_t g = 0; g < part.view.num_groups; ++g) {
      const LatentGroup& group = part.view.groups[g];
      std::vector<uint8_t> codes(static_cast<size_t>(group.width));
      const std::vector<char> packed =
          part.Load(group.codes, slot, CodesBytes(part.view, group));
      UnpackCodes(group, reinterpret_cast<const uint8_t*>(packed.data()),
                  codes.data());
      const int64_t number = DTypeBytes(part.view.param_dtype);
      const std::vector<char> ranges =
          part.Load(group.params, slot, ParamsBytes(part.view, group));
      const char* params = ranges.data();
      for (int64_t r = 0; r < group.num_runs; ++r) {
        const CodeRun& run = group.runs[r];
        for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
          const int64_t column = group.column + c;
          const auto scale = static_cast<double>(
              static_ranges
                  ? part.view.static_scale[column]
                  : NumberAt(part.view.param_dtype, params + 2 * r * number));
          const auto minimum = static_cast<double>(
              static_ranges ? part.view.static_minimum[column]
                            : NumberAt(part.view.param_dtype,
                                       params + (2 * r + 1) * number));
          const double code = codes[static_cast<size_t>(c)];
          const auto x = static_cast<double>(
              rows.numbers[t * static_cast<size_t>(rows.stride) +
                           static_cast<size_t>(column)]);
          const double most = (1 << run.bits) - 1;
          ASSERT_LE(code, most);
          if (static_ranges && (scale == 0.0 || run.bits == 0)) {
            ASSERT_EQ(0.0, code);
            continue;
          }
          const double exact = (x - minimum) / scale;
          if (static_ranges && (exact < -0.5 || exact > most + 0.5)) {
            ASSERT_EQ(exact < 0.0 ? 0.0 : most, code);
            ++clamped;
            continue;
          }
          ASSERT_NEAR(x, code * scale + minimum, 0.5001 * scale + 1e-6);
        }
      }
    }
    part.Erase(slot, &written.memory);
  }
  EXPECT_EQ(clamped, written.clamped);
  EXPECT_TRUE(written.memory == part.Memory(pages));
}

TEST_P(KvAppendTest, DecodedCodesDifferFromTheirNumbersByAtMostHalfAStep) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 8}) {
    for (const int64_t page_tokens : {16, 32, 64}) {
      Part part({Coded({{1, bits}}), Coded({{7, bits}, {24, bits}}),
                 Coded({{96, bits}}), Coded({{160, bits}, {300, bits}})},
                GetParam(), page_tokens);
      ExpectCodesOf(part, RandomRows(588, page_tokens), false);
    }
  }
}

TEST_P(KvAppendTest, RunsOfDifferentWidthsAreStoredInOneSlot) {
  for (const bool static_ranges : {false, true}) {
    Part part({Coded({{24, 8}, {24, 6}, {24, 5}, {24, 4}, {24, 3}, {24, 2}}),
               Coded({{3, 1}, {5, 5}, {7, 2}, {1, 6}, {9, 4}, {600, 3}}),
               Coded({{700, 4}, {3, 3}, {41, 3}, {53, 2}, {19, 1}})},
              GetParam(), 16, static_ranges);
    ExpectCodesOf(part, RandomRows(144 + 625 + 816, 16), static_ranges);
  }
}

// Tests pages of many tiles, and granules that end inside codes and ranges.
TEST_P(KvAppendTest, EverySlotIsStoredCorrectlyInTilesAndGranules) {
  for (const int64_t granule : {0, 4, 16}) {
    for (const bool static_ranges : {false, true}) {
      Part part({Coded({{24, 8}, {24, 4}, {20, 4}, {24, 3}, {24, 2}, {24, 1}}),
                 Coded({{3, 1}, {5, 3}, {7, 2}, {1, 8}, {9, 4}, {600, 3}})},
                GetParam(), 32, static_ranges,
                {.slots = 8, .granule_bytes = granule});
      ExpectCodesOf(part, RandomRows(140 + 625, 32), static_ranges);
    }
  }
}

// The last channels of a latent have codes of 0 bits. So nothing is written for
// them, and nothing is clamped.
TEST_P(KvAppendTest, ChannelsOfZeroBitsTakeNoBytes) {
  Part part({Coded({{24, 4}, {20, 2}, {30, 0}}), Coded({{9, 5}, {1, 0}})},
            GetParam(), 16, true);
  EXPECT_EQ(CodesBytes(part.view, part.view.groups[0]), 12 + 5);
  EXPECT_EQ(CodesBytes(part.view, part.view.groups[1]), 6);
  ExpectCodesOf(part, RandomRows(74 + 10, 16), true);
}

// Checks in float64 that every number is stored as the level nearest to it, and
// that the decoded row has the same L2 norm as the original row.
TEST_P(KvAppendTest, EachNumberIsStoredAsTheLevelNearestToIt) {
  constexpr int64_t kPageTokens = 16;
  for (const int bits : {1, 2, 3, 4}) {
    Part part({Coded({{64, bits}}), Coded({{1, bits}}), Coded({{37, bits}}),
               Coded({{600, bits}})},
              GetParam(), kPageTokens, false, {}, 1 << bits);
    Rows rows = RandomRows(64 + 1 + 37 + 600, kPageTokens);
    // One row has only zeros, which must stay zero. The norm of another row is
    // too large for the type of the scale, so this row must get the greatest
    // scale.
    const auto first = [&](size_t token) {
      return rows.numbers.begin() +
             static_cast<std::ptrdiff_t>(token) * rows.stride;
    };
    std::fill_n(first(0), 64, 0.0f);
    std::fill_n(first(2), 64, 1e30f);
    Written written = AppendOnAll(part, rows, 3);
    part.view.arena = written.memory.data();
    for (size_t t = 0; t < rows.slots.size(); ++t) {
      const int64_t slot = rows.slots[t];
      if (slot < 0) continue;
      for (int64_t g = 0; g < part.view.num_groups; ++g) {
        const LatentGroup& group = part.view.groups[g];
        std::vector<uint8_t> codes(static_cast<size_t>(group.width));
        const std::vector<char> packed =
            part.Load(group.codes, slot, CodesBytes(part.view, group));
        UnpackCodes(group, reinterpret_cast<const uint8_t*>(packed.data()),
                    codes.data());
        const float scale = NumberAt(
            GetParam(),
            part.Load(group.params, slot, ParamsBytes(part.view, group))
                .data());
        const auto row = first(t) + group.column;
        double squares = 0.0;
        for (int64_t c = 0; c < group.width; ++c) {
          squares += static_cast<double>(row[c]) * static_cast<double>(row[c]);
        }
        if (squares == 0.0 || squares > 1e38) {
          EXPECT_TRUE(std::isfinite(scale));
          EXPECT_EQ(scale == 0.0f, squares == 0.0);
          continue;
        }
        double coded = 0.0;
        for (int64_t c = 0; c < group.width; ++c) {
          const double x =
              static_cast<double>(row[c]) *
              std::sqrt(static_cast<double>(group.width) / squares);
          const auto level = static_cast<double>(
              part.view.levels[codes[static_cast<size_t>(c)]]);
          for (int other = 0; other < part.view.num_levels; ++other) {
            EXPECT_LE(
                std::abs(x - level),
                std::abs(x - static_cast<double>(part.view.levels[other])) +
                    1e-5);
          }
          coded += level * level;
        }
        EXPECT_NEAR(
            std::sqrt(squares), std::sqrt(coded) * scale,
            (GetParam() == DType::kBf16 ? 5e-3 : 6e-4) * std::sqrt(squares));
      }
    }
  }
}

// A slot has 9 codes of 4 bits, which take 4.5 bytes, and then 9 codes of 2
// bits. Granules of 4 bytes cut this stream inside the first run.
TEST(KvAppendGranulesTest, TheBytesOfASlotAreVisitedInOnePiecePerGranule) {
  Part part({Coded({{9, 4}, {9, 2}})}, DType::kF16, 4, true,
            {.granule_bytes = 4});
  const LatentGroup& group = part.view.groups[0];
  EXPECT_EQ(CodesBytes(part.view, group), 7);
  std::vector<char> memory = part.Memory(1);
  part.view.arena = memory.data();
  const char* const first = SlotAddress(part.view, group.codes, 0, 0);
  EXPECT_EQ(SlotAddress(part.view, group.codes, 0, 3) - first, 3 * 4);
  std::vector<std::vector<int64_t>> found;
  ForSlotBytes(part.view, group.codes, 0, 3, 7,
               [&](const char* at, int64_t byte, int64_t count) {
                 found.push_back({at - first, byte, count});
               });
  EXPECT_THAT(found,
              ::testing::ElementsAre(std::vector<int64_t>{12, 0, 4},
                                     std::vector<int64_t>{12 + 16, 4, 3}));
}

INSTANTIATE_TEST_SUITE_P(DTypes, KvAppendTest,
                         ::testing::Values(DType::kF32, DType::kF16,
                                           DType::kBf16));

TEST(KvAppendStaticTest, ClampedCodesAreCountedByAnyNumberOfThreads) {
  Part part({Coded({{64, 4}, {7, 1}})}, DType::kF16, 16, true);
  Rows rows;
  rows.stride = 71;
  rows.page_tokens = 16;
  for (int64_t t = 0; t < 500; ++t) rows.slots.push_back(t);
  rows.numbers = RandomFloats(500 * 71, 3, 2.0f);
  EXPECT_GT(AppendOnAll(part, rows, 32).clamped, 500);
}

TEST(KvAppendThreadsTest, AnyNumberOfThreadsGivesTheSameBytes) {
  // With so many numbers, the work is divided among threads.
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    Part part({Coded({{96, 4}, {24, 3}}), {37, {}}, Coded({{160, 1}})}, dtype,
              16);
    Rows rows;
    rows.stride = 317;
    rows.page_tokens = 16;
    for (int64_t t = 0; t < 80; ++t) rows.slots.push_back(79 - t);
    rows.numbers = RandomFloats(80 * 317, 17);
    AppendOnAll(part, rows, 5);
  }
}

TEST(KvAppendEmptyTest, AnAppendOfZeroTokensWritesNothing) {
  Part part({Coded({{24, 4}}), {8, {}}}, DType::kF16, 4);
  Rows rows;
  rows.stride = 32;
  rows.page_tokens = 4;
  EXPECT_TRUE(AppendOnAll(part, rows, 2).memory == part.Memory(2));
  rows.slots = {-1, -7, -1};
  rows.numbers = RandomFloats(3 * 32, 5);
  EXPECT_TRUE(AppendOnAll(part, rows, 2).memory == part.Memory(2));
}

TEST(KvAppendStaticTest, PartsMayShareACounterOfClampedCodes) {
  Part first({Coded({{64, 4}})}, DType::kF16, 16, true);
  Part second({Coded({{31, 2}, {40, 8}})}, DType::kF16, 16, true);
  Rows rows;
  rows.stride = 71;
  rows.page_tokens = 16;
  for (int64_t t = 0; t < 300; ++t) rows.slots.push_back(t);
  rows.numbers = RandomFloats(300 * 71, 6, 2.0f);
  const int64_t alone = AppendOnAll(first, rows, 19).clamped;
  const int64_t other = AppendOnAll(second, rows, 19).clamped;
  ASSERT_GT(alone, 0);
  ASSERT_GT(other, 0);
  std::vector<char> first_memory = first.Memory(19);
  std::vector<char> second_memory = second.Memory(19);
  first.view.arena = first_memory.data();
  second.view.arena = second_memory.data();
  TestStream four(4, CpuBackend::kSimd, 0);
  TestStream reference(1, CpuBackend::kReference, 0);
  for (TestStream* test : {&reference, &four}) {
    int64_t clamped = 5;
    AppendParts(*test, rows,
                {{0, OnDevice(first.view), OnDevice(&clamped)},
                 {0, OnDevice(second.view), OnDevice(&clamped)}});
    EXPECT_EQ(5 + alone + other, clamped);
  }
}

// Appends numbers that are not finite, and numbers whose range is too large for
// the type of ranges.
TEST(KvAppendNonFiniteTest, NonFiniteNumbersAffectOnlyTheirOwnTokens) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float greatest = std::numeric_limits<float>::max();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> kinds = {
      {nan, nan},           {infinity, -infinity},
      {nan, 1.0f},          {greatest, -greatest},
      {70000.0f, 70001.0f}, {-70000.0f, -70001.0f},
      {65510.0f, 65510.0f}, {-65510.0f, -2.0f},
      {1e-45f, -1e-45f},    {-0.0f, 0.0f},
      {0.0f, -0.0f}};
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    for (const bool static_ranges : {false, true}) {
      for (const std::vector<float>& kind : kinds) {
        Part part({Coded({{21, 4}, {20, 3}})}, dtype, 4, static_ranges);
        Rows rows = RandomRows(41, 4);
        for (size_t c = 0; c < 41; ++c) {
          rows.numbers[c] = kind[c * c / 3 % 2];
        }
        Written spoilt = AppendOnAll(part, rows, 3);
        std::vector<float> reported(rows.slots.size());
        reported[0] =
            std::isfinite(kind[0]) && std::isfinite(kind[1]) ? 0.0f : 1.0f;
        EXPECT_EQ(spoilt.not_finite, reported);
        for (int64_t r = 0; r < (static_ranges ? 0 : 4); ++r) {
          const LatentGroup& group = part.view.groups[0];
          part.view.arena = spoilt.memory.data();
          const float range = NumberAt(
              dtype, SlotAddress(part.view, group.params, 0, rows.slots[0]) +
                         r * DTypeBytes(dtype));
          EXPECT_TRUE(std::isfinite(range));
          EXPECT_FALSE(range == 0.0f && std::signbit(range));
          if (r % 2 == 0) {
            EXPECT_GE(range, 0.0f);
          }
        }
        // Other tokens must have the same bytes as if this token had not been
        // appended.
        rows.slots[0] = -1;
        Written others = AppendOnAll(part, rows, 3);
        part.Erase(3, &spoilt.memory);
        EXPECT_TRUE(spoilt.memory == others.memory);
      }
    }
  }
}

// Parses numbers whose bytes are given as hexadecimal digits.
template <typename Number>
std::vector<Number> FromHex(const std::string& digits) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(
        static_cast<uint8_t>(std::stoul(digits.substr(i, 2), nullptr, 16)));
  }
  std::vector<Number> numbers(bytes.size() / sizeof(Number));
  std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

DType DTypeNamed(const std::string& name) {
  return name == "F32"   ? DType::kF32
         : name == "F16" ? DType::kF16
                         : DType::kBf16;
}

class KvAppendGoldenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* source = std::getenv("KVASIR_SOURCE_DIR");
    ASSERT_NE(nullptr, source);
    std::ifstream file(std::string(source) +
                       "/tests/golden/codes/latents.json");
    ASSERT_TRUE(file.good());
    golden_ = json::parse(file);
    for (const auto& row : golden_["latents"]) {
      latents_.push_back(FromHex<float>(row));
    }
    minimum_ = FromHex<float>(golden_["static_minimum"][0]);
    scale_ = FromHex<float>(golden_["static_scale"][0]);
  }

  // Returns all rows of the golden data, but only their first `width` channels.
  Rows RowsOf(int64_t width) const {
    Rows rows;
    rows.stride = width;
    rows.page_tokens = 4;
    for (const std::vector<float>& row : latents_) {
      rows.numbers.insert(rows.numbers.end(), row.begin(), row.begin() + width);
      rows.slots.push_back(static_cast<int64_t>(rows.slots.size()));
    }
    return rows;
  }

  void Compare(const json& want) {
    GroupShape shape;
    for (const auto& run : want["runs"]) {
      shape.runs.push_back({run[0], run[1], run[2]});
      shape.width = shape.runs.back().begin + shape.runs.back().width;
    }
    const bool is_static = !want.contains("param_dtype");
    Part part({shape},
              is_static ? DType::kF32 : DTypeNamed(want["param_dtype"]), 4,
              is_static);
    if (is_static) {
      part.view.static_minimum = minimum_.data();
      part.view.static_scale = scale_.data();
    }
    const Rows rows = RowsOf(shape.width);
    Written written =
        AppendOnAll(part, rows, static_cast<int64_t>(rows.slots.size()) / 4);
    part.view.arena = written.memory.data();
    if (is_static) {
      EXPECT_EQ(want["clamped"], written.clamped);
    }
    for (size_t t = 0; t < rows.slots.size(); ++t) {
      CompareSlot(want, part, rows.slots[t]);
    }
  }

  static void CompareSlot(const json& want, const Part& part, int64_t slot) {
    const LatentGroup& group = part.view.groups[0];
    const auto row = static_cast<size_t>(slot);
    std::vector<uint8_t> codes(static_cast<size_t>(group.width));
    UnpackCodes(group,
                reinterpret_cast<const uint8_t*>(
                    SlotAddress(part.view, group.codes, slot / 4, slot % 4)),
                codes.data());
    EXPECT_EQ(FromHex<uint8_t>(want["codes"][row]), codes);
    if (part.view.static_scale != nullptr) return;
    const auto scale = FromHex<float>(want["scale"][row]);
    const auto minimum = FromHex<float>(want["minimum"][row]);
    const char* params =
        SlotAddress(part.view, group.params, slot / 4, slot % 4);
    const DType dtype = part.view.param_dtype;
    for (size_t r = 0; r < scale.size(); ++r) {
      EXPECT_EQ(BitsOf(scale[r]), BitsOf(NumberAt(dtype, params)));
      params += DTypeBytes(dtype);
      EXPECT_EQ(BitsOf(minimum[r]), BitsOf(NumberAt(dtype, params)));
      params += DTypeBytes(dtype);
    }
  }

  json golden_;
  std::vector<std::vector<float>> latents_;
  std::vector<float> minimum_;
  std::vector<float> scale_;
};

TEST_F(KvAppendGoldenTest, CodesAndRangesEqualThoseOfTheGoldenFileBitByBit) {
  int64_t compared = 0;
  for (const json& want : golden_["cases"]) {
    if (!want.contains("runs")) continue;
    SCOPED_TRACE(want["runs"].dump());
    Compare(want);
    ++compared;
  }
  EXPECT_EQ(22, compared);
}

TEST_F(KvAppendGoldenTest, StoredNumbersEqualThoseOfTheGoldenFileBitByBit) {
  int64_t compared = 0;
  for (const json& want : golden_["cases"]) {
    if (!want.contains("dtype")) continue;
    const DType dtype = DTypeNamed(want["dtype"]);
    const Rows rows = RowsOf(static_cast<int64_t>(latents_[0].size()));
    Part part({{rows.stride, {}}}, dtype, 4);
    Written written =
        AppendOnAll(part, rows, static_cast<int64_t>(rows.slots.size()) / 4);
    part.view.arena = written.memory.data();
    for (size_t t = 0; t < rows.slots.size(); ++t) {
      const auto values = FromHex<float>(want["values"][t]);
      const char* stored = SlotAddress(part.view, part.view.groups[0].codes,
                                       rows.slots[t] / 4, rows.slots[t] % 4);
      for (const float value : values) {
        EXPECT_EQ(BitsOf(value), BitsOf(NumberAt(dtype, stored)));
        stored += DTypeBytes(dtype);
      }
    }
    ++compared;
  }
  EXPECT_EQ(3, compared);
}

absl::Status Refusal(TestStream& test, const LatentPartArgs& view) {
  return Prepare(test.device(),
                 KvAppendShape{.row_stride = 74, .page_tokens = 4},
                 std::vector<KvAppendPart>{{0, OnDevice(view), nullptr}})
      .status();
}

// If slots are given as byte offsets, rows may begin at any offset.
TEST(KvAppendBytesTest, RowsMayBeWrittenAtAnyByteOffset) {
  const std::vector<float> rows = RandomFloats(3 * 10, 3, 1.0f);
  const std::vector<int64_t> slots = {50, -1, 6};
  // There are two groups, of 6 and 4 numbers, with a gap of two bytes before
  // each.
  LatentGroup groups[2];
  groups[0].width = 6;
  groups[0].codes = {.offset_bytes = 2, .stride_bytes = 12};
  groups[1].width = 4;
  groups[1].column = 6;
  groups[1].codes = {.offset_bytes = 16, .stride_bytes = 8};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    std::vector<char> memory(80, kUntouched);
    LatentPartArgs view;
    view.arena = memory.data();
    view.page_bytes = view.tile_bytes = 24;
    view.tile_slots = 1;
    view.groups = groups;
    view.num_groups = 2;
    TestStream test(1, backend);
    const auto append = Prepare(
        test.device(),
        KvAppendShape{
            .row_stride = 10, .page_tokens = 1, .slots_are_bytes = true},
        std::vector<KvAppendPart>{{0, OnDevice(view), nullptr}});
    KVASIR_ASSERT_OK(append);
    KVASIR_ASSERT_OK(KvAppend(
        test.stream(), *append,
        {OnDevice(rows.data()), OnDevice(slots.data()), 3}, test.workspace()));
    std::vector<char> expected(80, kUntouched);
    for (const size_t t : {0u, 2u}) {
      for (size_t c = 0; c < 10; ++c) {
        const Bf16 number = ToBf16(rows[t * 10 + c]);
        const size_t at =
            static_cast<size_t>(slots[t]) + 2 * c + (c < 6 ? 2 : 4);
        std::memcpy(expected.data() + at, &number, sizeof(number));
      }
    }
    EXPECT_EQ(memory, expected);
  }
}

TEST(KvAppendRefusalTest, RefusesByteOffsetsIfPagesHaveSeveralSlots) {
  TestStream test;
  Part part({{8, {}}}, DType::kBf16, 4);
  EXPECT_THAT(
      Prepare(test.device(),
              KvAppendShape{
                  .row_stride = 74, .page_tokens = 4, .slots_are_bytes = true},
              std::vector<KvAppendPart>{{0, OnDevice(part.view), nullptr}})
          .status(),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("page_tokens must be 1 if slots are given as "
                               "byte offsets, but is 4")));
}

// The place of metadata follows from the page's id, which a byte offset does
// not give.
TEST(KvAppendRefusalTest, RefusesByteOffsetsWithMetadata) {
  TestStream test;
  Part part({{8, {}}}, DType::kBf16, 1);
  EXPECT_THAT(
      Prepare(test.device(),
              KvAppendShape{.row_stride = 74,
                            .page_tokens = 1,
                            .metadata = {.num_units = 2},
                            .slots_are_bytes = true},
              std::vector<KvAppendPart>{{0, OnDevice(part.view), nullptr}})
          .status(),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("slots given as byte offsets cannot have "
                    "slot metadata, but have it for 2 eviction units")));
}

TEST(KvAppendRefusalTest, TheErrorNamesTheInvalidField) {
  TestStream test;
  const auto refuses = [&](const GroupShape& shape, int64_t stride_change,
                           const char* why) {
    Part part({shape}, DType::kBf16, 4);
    std::vector<LatentGroup> group(part.view.groups, part.view.groups + 1);
    group[0].codes.stride_bytes += stride_change;
    part.view.groups = group.data();
    EXPECT_THAT(
        Refusal(test, part.view),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refuses({75, {}}, 0, "row_stride: must be at least 75, but is 74");
  refuses(Coded({{9, 3}}), -1,
          "codes.stride_bytes: must be at least 4, but is 3");
  refuses(Coded({{9, 7}}), 8,
          "run 0: the bits of a code must be 1 to 6 or 8 (or 0 in the last of "
          "several runs with static ranges), not 7");
  refuses(Coded({{9, 3}, {3, 0}}), 8,
          "run 1: the bits of a code must be 1 to 6 or 8");
  refuses({9, {{0, 4, 3}, {5, 4, 3}}}, 8,
          "run 1 must begin at channel 4, but begins at channel 5");
  refuses(Coded({{9, 3}, {0, 3}}), 8,
          "run 1 must have at least 1 channel, but has 0");
  refuses({9, {{0, 4, 3}}}, 8,
          "the runs have 4 channels in all, but the latent has 9");
  refuses(Coded({{9, 3}}), 999, "tile_bytes: must be at least ");
  refuses(
      {8, {}}, 1,
      "codes: offset, stride, granule, tile and page must be multiples of 2 "
      "bytes, but one of them is 25 bytes");
}

TEST(KvAppendRefusalTest, TilesThatDoNotFillPagesExactlyAreRefused) {
  TestStream test;
  Part part({Coded({{9, 3}})}, DType::kBf16, 4, false, {.slots = 2});
  const auto refuses = [&](const LatentPartArgs& view, const char* why) {
    EXPECT_THAT(
        Refusal(test, view),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  LatentPartArgs view = part.view;
  view.tile_slots = 0;
  refuses(view, "tile_slots: must be at least 1, but is 0");
  view.tile_slots = 3;
  refuses(view,
          "the number of slots in a page, 4, is not a multiple of the number "
          "of slots in a tile, 3");
  view = part.view;
  view.page_bytes -= 1;
  refuses(view, "page_bytes: must be at least ");
  Part numbers({{8, {}}}, DType::kBf16, 4, false, {.slots = 2});
  view = numbers.view;
  view.tile_bytes -= 1;
  refuses(view, "multiples of 2 bytes, but one of them is ");
  Part granules({Coded({{9, 3}})}, DType::kBf16, 4, false,
                {.granule_bytes = 16});
  refuses(granules.view,
          "codes.granule_bytes must be 0 or the device's granule size, 0, but "
          "is 16");
}

TEST(KvAppendRefusalTest, IncompleteStaticRangesAndInvalidLevelsAreRefused) {
  TestStream test;
  const auto refuses = [&](const LatentPartArgs& view, const char* why) {
    EXPECT_THAT(
        Refusal(test, view),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  Part coded({Coded({{9, 3}})}, DType::kBf16, 4, true);
  LatentPartArgs half = coded.view;
  half.static_minimum = nullptr;
  refuses(half, "static ranges must have both scales and minima, or neither");
  half = coded.view;
  half.static_scale = nullptr;
  refuses(half, "static ranges must have both scales and minima, or neither");
  half = coded.view;
  half.num_levels = 8;
  refuses(half, "a part with static ranges must have 0 levels, but has 8");
  half.num_levels = 17;
  refuses(half, "a part must have from 0 to 16 levels, but has 17");
  Part levels({Coded({{9, 3}})}, DType::kBf16, 4, false, {}, 4);
  refuses(
      levels.view,
      "run 0 has codes of 8 values, but must have one value for each of the "
      "part's 4 levels");
  Part two_runs({Coded({{9, 2}, {3, 2}})}, DType::kBf16, 4, false, {}, 4);
  refuses(two_runs.view,
          "a latent with levels must have a single run of codes, but has 2");
  Part inner({Coded({{9, 3}, {3, 0}, {4, 2}})}, DType::kBf16, 4, true);
  refuses(inner.view, "run 1: the bits of a code must be 1 to 6 or 8");
  Part mixed({Coded({{9, 3}}), {8, {}}}, DType::kBf16, 4, true);
  refuses(mixed.view, "group 1 has static ranges, but no codes");
}

}  // namespace
}  // namespace kvasir::kernels
