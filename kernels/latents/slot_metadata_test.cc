#include "kernels/latents/slot_metadata.h"

#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "kernels/latents/ops.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPageTokens = 32;
constexpr int64_t kPages = 3;
constexpr int64_t kHeads = 4;
constexpr int64_t kUnits = 2;
// KV heads 0 and 1 form the first unit, and the others the second. So a group
// of two heads belongs to one unit.
int32_t UnitOfHead(int64_t head) { return head < 2 ? 0 : 1; }

// Returns planes of metadata with a gap before each plane and after the last
// one.
SlotMetadataArgs Planes() {
  SlotMetadataArgs metadata;
  metadata.page_tokens = kPageTokens;
  metadata.num_units = kUnits;
  metadata.scores_offset = 128;
  metadata.positions_offset = 512;
  metadata.error_offset[kKeyError] = 896;
  metadata.error_offset[kValueError] = 1024;
  metadata.page_bytes = 1152;
  return metadata;
}

struct Sides {
  TestPart key;
  TestPart value;
  std::vector<int32_t> key_units;
  std::vector<int32_t> value_units;

  Sides(const PartSpec& key_spec, const PartSpec& value_spec)
      : key(key_spec, kHeads, kPageTokens, 0, kPages, 1),
        value(value_spec, kHeads, kPageTokens, 0, kPages, 2),
        key_units(UnitsOf(key)),
        value_units(UnitsOf(value)) {}

  static std::vector<int32_t> UnitsOf(const TestPart& part) {
    std::vector<int32_t> units(static_cast<size_t>(part.part.num_groups));
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto group = part.group_of_head[static_cast<size_t>(head)];
      units[static_cast<size_t>(group)] = UnitOfHead(head);
    }
    return units;
  }
  int64_t width() const { return RowWidth(key.part) + RowWidth(value.part); }

  std::vector<KvAppendPartArgs> Parts() const {
    KvAppendPartArgs keys{0, key.part};
    keys.unit_of_group = key_units.data();
    keys.errors_of[kKeyError] = true;
    KvAppendPartArgs values{RowWidth(key.part), value.part};
    values.unit_of_group = value_units.data();
    values.errors_of[kValueError] = true;
    return {keys, values};
  }
};

absl::Status Append(TestStream& test, const Sides& sides,
                    const SlotMetadataArgs& metadata,
                    const std::vector<float>& numbers,
                    const std::vector<int64_t>& slots,
                    const std::vector<int64_t>& positions) {
  std::vector<KvAppendPart> parts;
  for (const KvAppendPartArgs& part : sides.Parts()) {
    parts.push_back(OnDevice(part));
  }
  KVASIR_ASSIGN_OR_RETURN(const PreparedKvAppend prepared,
                          Prepare(test.device(),
                                  KvAppendShape{.row_stride = sides.width(),
                                                .page_tokens = kPageTokens,
                                                .metadata = OnDevice(metadata)},
                                  parts));
  return KvAppend(test.stream(), prepared,
                  {OnDevice(numbers.data()),
                   OnDevice(slots.data()),
                   static_cast<int64_t>(slots.size()),
                   {},
                   positions.empty() ? nullptr : OnDevice(positions.data())},
                  test.workspace());
}

// Returns the L2 norm of the quantization errors of a unit's latents, computed
// in float64.
double ErrorOf(const TestPart& part, const float* row, int64_t unit,
               int64_t slot) {
  double squares = 0;
  int32_t last = -1;
  for (int64_t head = 0; head < kHeads; ++head) {
    const int32_t group = part.group_of_head[static_cast<size_t>(head)];
    if (UnitOfHead(head) != unit || group == last) continue;
    last = group;
    const std::vector<double> stored =
        part.Read(head, slot / kPageTokens, slot % kPageTokens);
    const float* x = row + part.part.groups[group].column;
    for (size_t i = 0; i < stored.size(); ++i) {
      const double off = static_cast<double>(x[i]) - stored[i];
      squares += off * off;
    }
  }
  return std::sqrt(squares);
}

TEST(SlotMetadataTest, AppendWritesScoresPositionsAndErrorsOfEveryCodec) {
  const std::vector<PartSpec> specs = {
      {.widths = {24}, .bits = {8}},
      {.widths = {33, 64}, .bits = {4}, .run_width = 16},
      {.widths = {40},
       .group_of_head = {0, 0, 1, 1},
       .bits = {3, 5, 1},
       .run_width = 7,
       .param_dtype = DType::kBf16},
      {.widths = {600}, .bits = {4}, .param_dtype = DType::kF32},
      {.widths = {48}, .bits = {2}, .fixed_ranges = true, .unstored = 9},
      {.widths = {37}, .bits = {3}, .levels = true},
      {.widths = {530},
       .group_of_head = {0, 0, 1, 1},
       .bits = {4},
       .levels = true},
  };
  const std::vector<int64_t> slots = {3, -1, 95, 64, 0, 31, 32};
  const std::vector<int64_t> positions = {7, 8, 9, 1000000, 11, 12, 13};
  for (size_t i = 0; i < specs.size(); ++i) {
    SCOPED_TRACE(i);
    Sides sides(specs[i], specs[(i + 1) % specs.size()]);
    const auto numbers = RandomFloats(
        static_cast<int64_t>(slots.size()) * sides.width(), 5, 0.7f);
    const std::vector<char> before(kPages * 1152, '\x55');
    std::vector<char> memory = before;
    SlotMetadataArgs metadata = Planes();
    metadata.arena = memory.data();
    TestStream reference(1, CpuBackend::kReference);
    KVASIR_EXPECT_OK(
        Append(reference, sides, metadata, numbers, slots, positions));
    for (size_t t = 0; t < slots.size(); ++t) {
      if (slots[t] < 0) continue;
      const int64_t page = slots[t] / kPageTokens;
      const int64_t slot = slots[t] % kPageTokens;
      const float* row =
          numbers.data() + t * static_cast<size_t>(sides.width());
      for (int64_t unit = 0; unit < kUnits; ++unit) {
        EXPECT_EQ(ScoresOf(metadata, page, unit)[slot], 0.0f);
        EXPECT_EQ(PositionsOf(metadata, page, unit)[slot], positions[t]);
        const uint8_t key = ErrorsOf(metadata, kKeyError, page, unit)[slot];
        const uint8_t value = ErrorsOf(metadata, kValueError, page, unit)[slot];
        const double key_error = ErrorOf(sides.key, row, unit, slots[t]);
        const double value_error = ErrorOf(
            sides.value, row + RowWidth(sides.key.part), unit, slots[t]);
        EXPECT_NEAR(DecodeError(key), key_error, 0.0595 * key_error);
        EXPECT_NEAR(DecodeError(value), value_error, 0.0595 * value_error);
      }
    }
    const std::vector<char> truth = memory;
    // No byte of other slots may be written.
    for (const int64_t slot : slots) {
      if (slot < 0) continue;
      const int64_t page = slot / kPageTokens;
      for (int64_t unit = 0; unit < kUnits; ++unit) {
        const int64_t at = slot % kPageTokens;
        std::memset(ScoresOf(metadata, page, unit) + at, 0x55, 4);
        std::memset(PositionsOf(metadata, page, unit) + at, 0x55, 4);
        for (const int side : {kKeyError, kValueError}) {
          ErrorsOf(metadata, side, page, unit)[at] = 0x55;
        }
      }
    }
    EXPECT_TRUE(memory == before);
    ForEachSimdTarget([&] {
      for (const int threads : {1, 3}) {
        memory = before;
        TestStream simd(threads);
        KVASIR_EXPECT_OK(
            Append(simd, sides, metadata, numbers, slots, positions));
        EXPECT_TRUE(memory == truth) << threads;
      }
    });
  }
}

TEST(SlotMetadataTest, PartsThatAreNotQuantizedHaveAQuantizationErrorOfZero) {
  Sides sides({.widths = {24}}, {.widths = {24}, .bits = {8}});
  std::vector<char> memory(kPages * 1152, '\x55');
  SlotMetadataArgs metadata = Planes();
  metadata.arena = memory.data();
  TestStream simd;
  KVASIR_EXPECT_OK(
      Append(simd, sides, metadata, RandomFloats(sides.width(), 5), {1}, {1}));
  EXPECT_EQ(ErrorsOf(metadata, kKeyError, 0, 0)[1], 0);
  EXPECT_GT(ErrorsOf(metadata, kValueError, 0, 0)[1], 0);
}

// In a joint part, keys and values are stored as one latent.
TEST(SlotMetadataTest, QuantizationErrorsOfAJointPartCountForKeysAndValues) {
  Sides sides({.widths = {24}, .bits = {3}}, {.widths = {24}, .bits = {8}});
  std::vector<char> memory(kPages * 1152, '\x55');
  SlotMetadataArgs metadata = Planes();
  metadata.arena = memory.data();
  std::vector<KvAppendPart> parts = {OnDevice(sides.Parts()[0])};
  parts[0].errors_of[kValueError] = true;
  TestStream simd;
  const absl::StatusOr<PreparedKvAppend> prepared =
      Prepare(simd.device(),
              KvAppendShape{.row_stride = sides.width(),
                            .page_tokens = kPageTokens,
                            .metadata = OnDevice(metadata)},
              parts);
  KVASIR_EXPECT_OK(prepared);
  const auto numbers = RandomFloats(sides.width(), 5);
  const int64_t slot = 9;
  KVASIR_EXPECT_OK(KvAppend(
      simd.stream(), *prepared,
      {OnDevice(numbers.data()), OnDevice(&slot), 1, {}, OnDevice(&slot)},
      simd.workspace()));
  for (int64_t unit = 0; unit < kUnits; ++unit) {
    EXPECT_GT(ErrorsOf(metadata, kKeyError, 0, unit)[slot], 0);
    EXPECT_EQ(ErrorsOf(metadata, kKeyError, 0, unit)[slot],
              ErrorsOf(metadata, kValueError, 0, unit)[slot]);
  }
}

TEST(SlotMetadataTest, RefusesInvalidMetadata) {
  Sides sides({.widths = {24}, .bits = {8}}, {.widths = {24}, .bits = {8}});
  std::vector<char> memory(kPages * 1152);
  const auto numbers = RandomFloats(sides.width(), 5);
  TestStream simd;
  const auto refusal = [&](auto change) {
    SlotMetadataArgs metadata = Planes();
    metadata.arena = memory.data();
    change(metadata);
    return Append(simd, sides, metadata, numbers, {1}, {1});
  };
  const auto invalid = [](const char* text) {
    return base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_THAT(refusal([](SlotMetadataArgs& m) { m.num_units = 1; }),
              invalid("group 2 belongs to eviction unit 1, but the units are "
                      "numbered from 0 to 0"));
  EXPECT_THAT(
      refusal([](SlotMetadataArgs& m) { m.page_tokens = 16; }),
      invalid(
          "metadata is for pages of 16 slots, but the cache has pages of 32"));
  EXPECT_THAT(refusal([](SlotMetadataArgs& m) { m.positions_offset = 130; }),
              invalid("overlap, are misaligned or are not inside a page"));
  EXPECT_THAT(refusal([](SlotMetadataArgs& m) { m.positions_offset = 380; }),
              invalid("overlap, are misaligned or are not inside a page"));
  EXPECT_THAT(refusal([](SlotMetadataArgs& m) { m.page_bytes = 1084; }),
              invalid("overlap, are misaligned or are not inside a page"));
  SlotMetadataArgs metadata = Planes();
  metadata.arena = memory.data();
  EXPECT_THAT(Append(simd, sides, metadata, numbers, {1}, {}),
              invalid("slot metadata needs the positions"));
}

}  // namespace
}  // namespace kvasir::kernels
