#include "kernels/attention/cpu/code_dots.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/latents/code_pack.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kSlots = 64;
constexpr float kPoison = 12345.0f;

// A latent of two runs. Only the second run is tested, so the tested codes can
// begin at any bit of a slot. The memory ends `after` bytes after the last
// slot's codes, so a sanitizer finds a read beyond them.
struct Slots {
  Slots(int bits, int64_t before, int64_t width, bool by_level, uint32_t seed,
        int64_t after = 0)
      : runs{{0, before, 3}, {before, width, bits}} {
    if (before == 0) runs.erase(runs.begin());
    group.width = before + width;
    group.runs = runs.data();
    group.num_runs = static_cast<int64_t>(runs.size());
    slot_bytes = (PlanesOf(group).total_bits + 7) / 8;
    memory = std::vector<uint8_t>(
        static_cast<size_t>(kSlots * slot_bytes + after), uint8_t{0xa5});
    const std::vector<float> random =
        TestPart::Uniform(kSlots * group.width, seed, 0.0f, 256.0f);
    codes.resize(random.size());
    for (size_t i = 0; i < random.size(); ++i) {
      codes[i] = static_cast<uint8_t>(random[i]);
    }
    for (int64_t s = 0; s < kSlots; ++s) {
      uint8_t* const own = codes.data() + s * group.width;
      for (const CodeRun& run : runs) {
        for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
          own[c] = static_cast<uint8_t>(own[c] & ((1 << run.bits) - 1));
        }
      }
      PackCodes(group, own, memory.data() + s * slot_bytes);
      addresses.push_back(
          reinterpret_cast<const char*>(memory.data() + s * slot_bytes));
    }
    CodeCursor cursor(group);
    for (const CodeRun& run : runs) {
      piece.place = cursor.Next(run);
      piece.begin = run.begin;
    }
    piece.in_chunk = piece.place;
    piece.width = width;
    const std::vector<float> level =
        TestPart::Uniform(16, seed + 1, -127.0f, 127.0f);
    for (int i = 0; i < 16; ++i) {
      levels[i] = static_cast<int8_t>(level[static_cast<size_t>(i)]);
    }
    if (by_level) number_levels = levels;
  }

  int32_t NumberOf(int64_t slot, int64_t channel) const {
    const uint8_t code =
        codes[static_cast<size_t>(slot * group.width + piece.begin + channel)];
    return number_levels != nullptr ? number_levels[code] : code;
  }

  std::vector<CodeRun> runs;
  LatentGroup group;
  int64_t slot_bytes;
  std::vector<uint8_t> memory;
  std::vector<uint8_t> codes;
  std::vector<const char*> addresses;
  CodePiece piece;
  int8_t levels[16];
  const int8_t* number_levels = nullptr;
};

// Numbers that are hard to write as digits: one outlier, numbers that are
// nearly or exactly zero, and equal numbers. With ten random rows there are 15,
// which need register tiles of 8, 4, 2 and 1 rows.
std::vector<std::vector<float>> HardNumbers(int64_t count, float low) {
  const auto random = TestPart::Uniform(count, 77, low, 1.0f);
  std::vector<std::vector<float>> all = {random, random, random, random};
  all[1][static_cast<size_t>(count / 2)] = 1e6f;
  for (float& x : all[2]) x *= 1e-42f;
  std::fill(all[3].begin(), all[3].end(), 0.75f);
  all.push_back(std::vector<float>(static_cast<size_t>(count), 0.0f));
  for (uint32_t seed = 100; seed < 110; ++seed) {
    all.push_back(TestPart::Uniform(count, seed, low, 1.0f));
  }
  return all;
}

struct Case {
  int bits;
  int64_t before;
  int64_t width;
  bool by_level;
};
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int bits : {1, 2, 3, 4, 5, 6, 8}) {
    for (const int64_t width : {1, 7, 8, 24, 33, 64, 100, 128}) {
      for (const int64_t before : {0, 5, 16}) {
        cases.push_back({bits, before, width, false});
        if (bits <= 4) cases.push_back({bits, before, width, true});
      }
    }
  }
  return cases;
}
std::string NameOf(const Case& each) {
  return std::to_string(each.bits) + " bits, " + std::to_string(each.before) +
         " channels before, " + std::to_string(each.width) + " channels" +
         (each.by_level ? ", levels" : "");
}

TEST(CodeDotsTest, KeyDotProductsAreExactExceptForTheRoundingOfQueries) {
  for (const Case& each : Cases()) {
    SCOPED_TRACE(NameOf(each));
    const Slots slots(each.bits, each.before, each.width, each.by_level, 3);
    const auto words = (slots.slot_bytes + 3) / 4;
    // RunKeyDots may read one row of words beyond the codes.
    std::vector<uint32_t> transposed(static_cast<size_t>((words + 34) * kSlots),
                                     0xa5a5a5a5u);
    for (int64_t s = 0; s < kSlots; ++s) {
      for (int64_t b = 0; b < slots.slot_bytes; ++b) {
        uint32_t& word = transposed[static_cast<size_t>(b / 4 * kSlots + s)];
        const auto shift = static_cast<unsigned>(b % 4 * 8);
        word = (word & ~(0xffu << shift)) |
               uint32_t{static_cast<uint8_t>(
                   slots.addresses[static_cast<size_t>(s)][b])}
                   << shift;
      }
    }
    const uint32_t* const planes[4] = {transposed.data(), transposed.data(),
                                       transposed.data(), transposed.data()};
    const auto queries = HardNumbers(each.width, -1.0f);
    const auto rows = static_cast<int64_t>(queries.size());
    const int64_t stride = DigitWords(slots.piece);
    constexpr float kStep = 0.375f;
    std::vector<uint32_t> digits(static_cast<size_t>(rows * stride));
    AheadLines ahead;
    std::vector<float> first;
    ForEachSimdTarget([&] {
      for (int64_t r = 0; r < rows; ++r) {
        CutQuery(slots.piece, queries[static_cast<size_t>(r)].data(), kStep,
                 digits.data() + r * stride);
      }
      std::vector<float> c(static_cast<size_t>((rows + 1) * kSlots), kPoison);
      KeyDotsArgs args = {planes,        &slots.piece, slots.number_levels,
                          digits.data(), stride,       c.data(),
                          false,         &ahead};
      RunKeyDots(rows, args);
      EXPECT_EQ(c.back(), kPoison);
      if (first.empty()) first = c;
      EXPECT_TRUE(SameBits(first, c));
      // Fewer rows take other register tiles.
      for (int64_t few = 1; few < 4; ++few) {
        std::fill(c.begin(), c.end(), kPoison);
        RunKeyDots(few, args);
        EXPECT_TRUE(
            std::equal(c.begin(), c.begin() + few * kSlots, first.begin()));
        EXPECT_EQ(c[static_cast<size_t>(few * kSlots)], kPoison);
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      const auto unit =
          double{std::bit_cast<float>(digits[static_cast<size_t>(r * stride)])};
      for (int64_t s = 0; s < kSlots; ++s) {
        double exact = 0.0;
        double size = 0.0;
        for (int64_t c = 0; c < each.width; ++c) {
          const double number = slots.NumberOf(s, c);
          exact +=
              double{kStep} * number *
              double{queries[static_cast<size_t>(r)][static_cast<size_t>(c)]};
          size += std::abs(number);
        }
        const double got = first[static_cast<size_t>(r * kSlots + s)];
        ASSERT_LE(std::abs(got - exact),
                  0.5001 * unit * size + 1e-6 * std::abs(exact) + 1e-25)
            << "row " << r << ", slot " << s;
      }
    }
  }
}

TEST(CodeDotsTest, ValueSumsAreExactExceptForTheRoundingOfWeights) {
  for (const Case& each : Cases()) {
    SCOPED_TRACE(NameOf(each));
    struct Read {
      int64_t begin;
      int64_t end;
      int64_t after;  // codes are read in place only if memory follows them
    };
    for (const Read& read : {Read{0, kSlots, 0}, Read{13, 51, 0},
                             Read{0, kSlots, 192}, Read{13, 51, 192}}) {
      const int64_t begin = read.begin;
      const int64_t end = read.end;
      const int64_t after = read.after;
      const Slots slots(each.bits, each.before, each.width, each.by_level, 5,
                        after);
      const auto weights = HardNumbers(kSlots, 0.0f);
      const auto rows = static_cast<int64_t>(weights.size());
      std::vector<WeightDigits> digits(weights.size());
      for (size_t r = 0; r < weights.size(); ++r) {
        DigitRange range;
        for (int64_t s = begin; s < end; ++s) {
          range.Add(weights[r][static_cast<size_t>(s)]);
        }
        const DigitScale cut =
            DigitScale::Of(range.largest(), kMostWeightDigits);
        digits[r] = {};
        digits[r].unit = cut.unit;
        for (int64_t s = begin; s < end; ++s) {
          const int32_t integer = cut.Round(weights[r][static_cast<size_t>(s)]);
          digits[r].Set(s, integer);
          digits[r].sum += integer;
        }
      }
      // Slots that are not read have no address.
      std::vector<const char*> addresses(kSlots, nullptr);
      std::copy(slots.addresses.begin() + begin, slots.addresses.begin() + end,
                addresses.begin() + begin);
      AheadLines ahead;
      std::vector<float> first;
      const int64_t stride = each.width + 3;
      ForEachSimdTarget([&] {
        std::vector<float> c(static_cast<size_t>(rows * stride), 0.5f);
        std::vector<float> numbers(kValueDotsFloats + 16);
        void* aligned = numbers.data();
        size_t space = numbers.size() * sizeof(float);
        std::align(64, kValueDotsFloats * sizeof(float), aligned, space);
        ValueDotsArgs args = {};
        args.slots = addresses.data();
        args.begin = begin;
        args.end = end;
        args.room = slots.slot_bytes + after;
        args.place = slots.piece.place;
        args.width = each.width;
        args.levels = slots.number_levels;
        args.numbers = static_cast<float*>(aligned);
        args.digits = digits.data();
        args.c = c.data();
        args.c_stride = stride;
        args.ahead = &ahead;
        RunValueDots(rows, args);
        if (first.empty()) first = c;
        EXPECT_TRUE(SameBits(first, c));
        // Fewer rows take other register tiles.
        for (int64_t few = 1; few < 4; ++few) {
          std::fill(c.begin(), c.end(), 0.5f);
          RunValueDots(few, args);
          EXPECT_TRUE(
              std::equal(c.begin(), c.begin() + few * stride, first.begin()));
          EXPECT_EQ(c[static_cast<size_t>(few * stride)], 0.5f);
        }
      });
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < stride; ++c) {
          const double got = first[static_cast<size_t>(r * stride + c)];
          if (c >= each.width) {
            ASSERT_EQ(got, 0.5) << "row " << r << ", channel " << c;
            continue;
          }
          double exact = 0.5;
          double size = 0.0;
          for (int64_t s = begin; s < end; ++s) {
            const double number = slots.NumberOf(s, c);
            exact +=
                number *
                double{weights[static_cast<size_t>(r)][static_cast<size_t>(s)]};
            size += std::abs(number);
          }
          ASSERT_LE(
              std::abs(got - exact),
              0.5001 * double{digits[static_cast<size_t>(r)].unit} * size +
                  1e-6 * std::abs(exact) + 1e-25)
              << "row " << r << ", channel " << c;
        }
      }
    }
  }
}

TEST(CodeDigitsTest, InfiniteOrNaNNumbersMakeTheUnitOfTheirDigitsNaN) {
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    DigitRange range;
    range.Add(1.0f);
    range.Add(bad);
    range.Add(2.0f);
    const DigitScale cut = DigitScale::Of(range.largest(), kMostQueryDigits);
    EXPECT_TRUE(std::isnan(cut.unit));
    EXPECT_EQ(cut.Round(bad), 0);
  }
}

TEST(CodeDigitsTest, AnOutlierInOneRowDoesNotChangeTheDigitsOfAnotherRow) {
  CodePiece piece;
  piece.width = 8;
  piece.place.low_bits = 4;
  const std::vector<float> q = TestPart::Uniform(8, 1, -1.0f, 1.0f);
  std::vector<float> outlier = q;
  outlier[3] = 1e9f;
  const auto cut = [&](const std::vector<float>& row) {
    std::vector<uint32_t> digits(static_cast<size_t>(DigitWords(piece)));
    CutQuery(piece, row.data(), 1.0f, digits.data());
    return digits;
  };
  const std::vector<uint32_t> before = cut(q);
  EXPECT_NE(cut(outlier), before);
  EXPECT_EQ(cut(q), before);
}

}  // namespace
}  // namespace kvasir::kernels
