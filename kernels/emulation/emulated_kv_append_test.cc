// Tests the kv_append kernel: it must write the same bytes as the reference
// implementation.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/append_parts.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();
constexpr int64_t kGranule = 16;  // the device's page granule

// Everything that kv_append writes.
struct Memory {
  std::vector<std::vector<char>> pages;  // by part
  std::vector<int64_t> clamped;          // clamped codes of each part
  std::vector<float> not_finite;         // one element per token
  std::vector<char> planes;              // slot metadata
  friend bool operator==(const Memory&, const Memory&) = default;
};

struct Append {
  std::deque<Part> parts;
  std::vector<int64_t> columns;  // one element per part
  Rows rows;
  int64_t pages = 3;
  bool without_slots = false;
  bool slots_are_bytes = false;
  // Whether clamped codes and tokens with non-finite numbers are reported.
  bool reports = true;
  DType dtype = DType::kF32;  // type of activations
  // units[p][g] is the unit of group g of part p. Empty without metadata.
  std::vector<std::vector<int32_t>> units;
  SlotMetadataArgs metadata;
  std::vector<int64_t> positions;

  int64_t num_tokens() const { return static_cast<int64_t>(rows.slots.size()); }

  // The sizes and types of the op's arguments, without addresses.
  KvAppendShape Shape() const {
    KvAppendShape shape;
    shape.row_stride = rows.stride;
    shape.page_tokens = rows.page_tokens;
    shape.slots_are_bytes = slots_are_bytes;
    shape.metadata = OnDevice(metadata);
    return shape;
  }
  KvAppendPart PartOf(size_t p) const {
    KvAppendPart side;
    side.column = columns[p];
    side.part = OnDevice(parts[p].view);
    if (p < units.size() && !units[p].empty()) {
      side.unit_of_group = units[p].data();
      side.errors_of[kKeyError] = p % 2 == 0;
      side.errors_of[kValueError] = p > 0;
    }
    return side;
  }
  Memory Untouched() const {
    Memory memory;
    for (const Part& part : parts) {
      memory.pages.emplace_back(
          static_cast<size_t>(pages * part.view.page_bytes), kUntouched);
    }
    memory.clamped.assign(parts.size(), 7);
    memory.not_finite.assign(rows.slots.size(), 0.0f);
    memory.planes.assign(static_cast<size_t>(pages * metadata.page_bytes),
                         kUntouched);
    return memory;
  }
};

Memory AppendByReference(const Append& append) {
  Memory memory = append.Untouched();
  std::vector<KvAppendPart> parts;
  for (size_t p = 0; p < append.parts.size(); ++p) {
    parts.push_back(append.PartOf(p));
    parts.back().part.arena = OnDevice<void>(memory.pages[p].data());
    if (append.reports) parts.back().clamped = OnDevice(&memory.clamped[p]);
  }
  KvAppendShape shape = append.Shape();
  shape.metadata.arena = OnDevice<void>(memory.planes.data());
  const auto test = TestStream::InGranules(kGranule);
  const auto prepared = Prepare(test->device(), shape, parts);
  KVASIR_EXPECT_OK(prepared.status());
  const std::vector<float> numbers = Rounded(append.rows.numbers, append.dtype);
  KVASIR_EXPECT_OK(KvAppend(
      test->stream(), *prepared,
      {OnDevice(numbers.data()),
       OnDevice(append.without_slots ? nullptr : append.rows.slots.data()),
       append.num_tokens(),
       OnDevice(append.reports ? memory.not_finite.data() : nullptr),
       OnDevice(append.positions.data())},
      test->workspace()));
  return memory;
}

Memory AppendByKernel(EmulatedTest& test, const Append& append) {
  Memory memory = append.Untouched();
  std::vector<KvAppendPart> parts;
  std::vector<DeviceBuffer> pages, ranges;
  const DeviceBuffer clamped = test.Put(memory.clamped);
  for (size_t p = 0; p < append.parts.size(); ++p) {
    pages.push_back(test.Put(memory.pages[p]));
    KvAppendPart& side = parts.emplace_back(append.PartOf(p));
    side.part.arena = pages.back().data();
    if (append.reports) {
      side.clamped = clamped.as<int64_t>() + static_cast<int64_t>(p);
    }
    const LatentPartArgs& view = append.parts[p].view;
    if (view.static_scale != nullptr) {
      const int64_t width = RowWidth(view);
      const auto put = [&](const float* from) {
        ranges.push_back(test.Put(std::vector<float>(from, from + width)));
        return DevicePtr<const float>(ranges.back().as<float>());
      };
      side.part.static_scale = put(view.static_scale);
      side.part.static_minimum = put(view.static_minimum);
    }
  }
  const DeviceBuffer planes = test.Put(memory.planes);
  const DeviceBuffer rows = test.PutNumbers(append.rows.numbers, append.dtype);
  const DeviceBuffer slots = test.Put(append.rows.slots);
  const DeviceBuffer positions = test.Put(append.positions);
  const DeviceBuffer not_finite = test.Put(memory.not_finite);
  KvAppendShape shape = append.Shape();
  shape.dtype = append.dtype;
  shape.metadata.arena = planes.data();
  const auto prepared = Prepare(test.device(), shape, parts);
  KVASIR_EXPECT_OK(prepared.status());
  const KvAppendRows step = {
      rows.as<float>(),
      append.without_slots ? DevicePtr<const int64_t>() : slots.as<int64_t>(),
      append.num_tokens(),
      append.reports ? not_finite.as<float>() : DevicePtr<float>(),
      positions.as<int64_t>()};
  Workspace counter = Workspace::Counting();
  KVASIR_EXPECT_OK(KvAppend(test.stream(), *prepared, step, counter));
  const DeviceBuffer scratch = test.Memory(counter.peak_bytes());
  Workspace workspace = EmulatedTest::WorkspaceOf(scratch);
  KVASIR_EXPECT_OK(KvAppend(test.stream(), *prepared, step, workspace));
  for (size_t p = 0; p < append.parts.size(); ++p) {
    memory.pages[p] = test.Get<char>(pages[p]);
  }
  memory.clamped = test.Get<int64_t>(clamped);
  memory.not_finite = test.Get<float>(not_finite);
  memory.planes = test.Get<char>(planes);
  return memory;
}

// Describes a part: its groups, the type of its numbers or ranges, and its
// layout.
struct PartShape {
  std::vector<GroupShape> groups;
  DType dtype = DType::kF16;
  bool static_ranges = false;
  int num_levels = 0;
  Tiles tiles = {};
};

// Makes parts of these shapes, and rows of random numbers. A row has the
// latents of all parts, one after another.
Append AppendOf(const std::vector<PartShape>& shapes,
                int64_t page_tokens = 16) {
  Append append;
  int64_t width = 0;
  for (const PartShape& shape : shapes) {
    append.parts.emplace_back(shape.groups, shape.dtype, page_tokens,
                              shape.static_ranges, shape.tiles,
                              shape.num_levels);
    append.columns.push_back(width);
    width += RowWidth(append.parts.back().view);
  }
  append.rows = RandomRows(width, page_tokens);
  return append;
}

// Calls `visit` for every contiguous piece of part p's slots in `memory`. A
// piece has either codes or ranges (params).
template <typename Visit>
void ForAllSlots(const Append& append, size_t p, std::vector<char>* memory,
                 const Visit& visit) {
  LatentPartArgs part = append.parts[p].view;
  part.arena = memory->data();
  for (int64_t slot = 0; slot < append.pages * append.rows.page_tokens;
       ++slot) {
    for (int64_t g = 0; g < part.num_groups; ++g) {
      const LatentGroup& group = part.groups[g];
      for (const bool params : {false, true}) {
        ForSlotBytes(
            part, params ? group.params : group.codes,
            slot / append.rows.page_tokens, slot % append.rows.page_tokens,
            params ? ParamsBytes(part, group) : CodesBytes(part, group),
            [&](char* at, int64_t first, int64_t count) {
              visit(at, count, slot, g, first, params);
            });
      }
    }
  }
}

// Gives all NaNs that are stored without codes the same bits, because
// kv_append.h does not define the bits of a stored NaN.
void MakeNansAlike(const Append& append, Memory* memory) {
  for (size_t p = 0; p < append.parts.size(); ++p) {
    const LatentPartArgs& part = append.parts[p].view;
    ForAllSlots(
        append, p, &memory->pages[p],
        [&](char* at, int64_t count, int64_t, int64_t g, int64_t, bool params) {
          if (params || part.groups[g].num_runs > 0) return;
          VisitDType(part.dtype, [&](auto type) {
            for (char* const end = at + count; at < end; at += sizeof(type)) {
              std::memcpy(&type, at, sizeof(type));
              if (!std::isnan(ToFloat(type))) continue;
              std::fill_n(at, sizeof(type), '\xff');
            }
          });
        });
  }
}

// Describes the first byte of part p in which `got` differs from `want`: its
// place and both values.
std::string FirstDifference(const Append& append, size_t p,
                            std::vector<char> want, std::vector<char> got) {
  const int64_t at =
      std::mismatch(want.begin(), want.end(), got.begin()).first - want.begin();
  const LatentPartArgs& part = append.parts[p].view;
  std::string text = absl::StrCat("part ", p, ", byte ", at % part.page_bytes,
                                  " of page ", at / part.page_bytes);
  std::string place = ", of no slot";
  int64_t begin = at, bytes = 1;
  ForAllSlots(append, p, &want,
              [&](char* address, int64_t count, int64_t slot, int64_t g,
                  int64_t first, bool params) {
                const int64_t offset = address - want.data();
                if (at < offset || at >= offset + count) return;
                const bool number = params || part.groups[g].num_runs == 0;
                const DType dtype = params ? part.param_dtype : part.dtype;
                if (number) {
                  bytes = DTypeBytes(dtype);
                  begin = at - (at - offset) % bytes;
                }
                place = absl::StrCat(
                    ", slot ", slot, ", group ", g, ", ",
                    params   ? "number of ranges "
                    : number ? "number "
                             : "byte of codes ",
                    (first + at - offset) / bytes,
                    number ? absl::StrCat(", ", DTypeName(dtype)) : "");
              });
  const auto hex = [&](const std::vector<char>& memory) {
    std::string digits;
    for (int64_t i = begin + bytes; i-- > begin;) {
      absl::StrAppend(
          &digits,
          absl::Hex(static_cast<uint8_t>(memory[static_cast<size_t>(i)]),
                    absl::kZeroPad2));
    }
    return digits;
  };
  return absl::StrCat(text, place, ": 0x", hex(got), ", want 0x", hex(want));
}

uint64_t next_seed = 0;

void ExpectTheReferencesBytes(const Append& append) {
  EmulatedTest test(++next_seed);
  Memory want = AppendByReference(append);
  Memory got = AppendByKernel(test, append);
  if (OnGpu() && !append.slots_are_bytes) {
    MakeNansAlike(append, &want);
    MakeNansAlike(append, &got);
  }
  for (size_t p = 0; p < want.pages.size(); ++p) {
    EXPECT_TRUE(want.pages[p] == got.pages[p])
        << DTypeName(append.dtype) << " rows, "
        << FirstDifference(append, p, want.pages[p], got.pages[p]);
  }
  EXPECT_EQ(want.clamped, got.clamped);
  EXPECT_EQ(want.not_finite, got.not_finite);
  EXPECT_TRUE(want.planes == got.planes);
}

// Two layouts of pages: slots one after the other, and tiles of four slots.
const Tiles kTiles[] = {{}, {.slots = 4, .granule_bytes = kGranule}};

TEST(KvAppendCudaTest, NumbersOfEveryTypeAreStoredExactlyAsByTheReference) {
  for (const DType activations : kDTypes) {
    for (const DType dtype : kDTypes) {
      for (const Tiles& tiles : kTiles) {
        Append append =
            AppendOf({{{{37, {}}, {64, {}}, {1, {}}}, dtype, false, 0, tiles}});
        append.dtype = activations;
        append.rows.numbers[5] = std::numeric_limits<float>::quiet_NaN();
        append.rows.numbers[6] = 1e-7f;  // subnormal in float16
        append.rows.numbers[7] = -3e38f;
        ExpectTheReferencesBytes(append);
      }
    }
  }
}

TEST(KvAppendCudaTest, CodesOfEveryWidthAreStoredExactlyAsByTheReference) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 8}) {
    for (const bool static_ranges : {false, true}) {
      for (const Tiles& tiles : kTiles) {
        ExpectTheReferencesBytes(
            AppendOf({{{Coded({{1, bits}}), Coded({{7, bits}, {24, bits}}),
                        Coded({{96, bits}}), Coded({{160, bits}, {300, bits}})},
                       kDTypes[bits % 3],
                       static_ranges,
                       0,
                       tiles}}));
      }
    }
  }
}

TEST(KvAppendCudaTest, OneSlotCanHoldRunsOfCodesOfDifferentWidths) {
  for (const DType activations : kDTypes) {
    for (const bool static_ranges : {false, true}) {
      for (const Tiles& tiles : kTiles) {
        Append append = AppendOf(
            {{{Coded({{24, 8}, {24, 6}, {24, 5}, {24, 4}, {24, 3}, {24, 2}}),
               Coded({{3, 1}, {5, 5}, {7, 2}, {1, 6}, {9, 4}, {600, 3}}),
               Coded({{700, 4}, {3, 3}, {41, 3}, {53, 2}, {19, 1}})},
              activations,
              static_ranges,
              0,
              tiles}});
        append.dtype = activations;
        ExpectTheReferencesBytes(append);
      }
    }
  }
}

TEST(KvAppendCudaTest, ChannelsWithZeroBitsTakeNoBytes) {
  ExpectTheReferencesBytes(
      AppendOf({{{Coded({{24, 4}, {20, 2}, {30, 0}}), Coded({{9, 5}, {1, 0}})},
                 DType::kF16,
                 true}}));
}

// Some rows have only zeros, and some have a norm that is too large for the
// type of the scales.
TEST(KvAppendCudaTest, CodesThatIndexATableOfLevelsMatchTheReferenceExactly) {
  for (const int bits : {1, 2, 3, 4}) {
    for (const DType dtype : kDTypes) {
      for (const Tiles& tiles : kTiles) {
        Append append = AppendOf({{{Coded({{64, bits}}), Coded({{1, bits}}),
                                    Coded({{37, bits}}), Coded({{600, bits}})},
                                   dtype,
                                   false,
                                   1 << bits,
                                   tiles}});
        const auto stride = static_cast<std::ptrdiff_t>(append.rows.stride);
        std::fill_n(append.rows.numbers.begin(), 64, 0.0f);
        std::fill_n(append.rows.numbers.begin() + 2 * stride, 64, 1e30f);
        ExpectTheReferencesBytes(append);
      }
    }
  }
}

TEST(KvAppendCudaTest, NonFiniteNumbersAffectOnlyTheirOwnTokens) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float greatest = std::numeric_limits<float>::max();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> kinds = {
      {nan, nan},           {infinity, -infinity},
      {nan, 1.0f},          {greatest, -greatest},
      {70000.0f, 70001.0f}, {-70000.0f, -70001.0f},
      {65510.0f, -2.0f},    {1e-45f, -1e-45f},
      {-0.0f, 0.0f},        {0.0f, -0.0f}};
  for (const DType dtype : kDTypes) {
    for (const std::vector<float>& kind : kinds) {
      // Four parts: numbers without codes, codes with ranges in slots, codes
      // with static ranges, and codes with levels.
      Append append = AppendOf({{{{5, {}}}, dtype},
                                {{Coded({{21, 4}, {20, 3}})}, dtype},
                                {{Coded({{21, 4}, {20, 0}})}, dtype, true},
                                {{Coded({{41, 3}})}, dtype, false, 8}});
      for (size_t token = 0; token < 4; ++token) {
        // Puts the numbers of `kind` into one part of each token: those of
        // token t into part t.
        const size_t begin = token * static_cast<size_t>(append.rows.stride) +
                             static_cast<size_t>(append.columns[token]);
        const auto width = RowWidth(append.parts[token].view);
        for (size_t c = 0; c < static_cast<size_t>(width); ++c) {
          append.rows.numbers[begin + c] = kind[c * c / 3 % 2];
        }
      }
      append.rows.slots[1] = 9;
      ExpectTheReferencesBytes(append);
      const Memory want = AppendByReference(append);
      const bool finite = std::isfinite(kind[0]) && std::isfinite(kind[1]);
      EXPECT_EQ(want.not_finite[0], 0.0f);
      EXPECT_EQ(want.not_finite[1], finite ? 0.0f : 1.0f);
    }
  }
}

TEST(KvAppendCudaTest, TokensWithoutASlotAndEmptyBatchesWriteNothing) {
  Append append = AppendOf({{{Coded({{24, 4}}), {8, {}}}}}, 4);
  append.rows.slots.clear();
  append.rows.numbers.clear();
  ExpectTheReferencesBytes(append);
  append = AppendOf({{{Coded({{24, 4}}), {8, {}}}}}, 4);
  append.rows.slots = {-1, -7, -1};
  ExpectTheReferencesBytes(append);
  EXPECT_TRUE(AppendByReference(append) == append.Untouched());
}

TEST(KvAppendCudaTest, WithoutAListOfSlotsTokensAreStoredInConsecutiveSlots) {
  Append append = AppendOf({{{Coded({{24, 4}}), Coded({{9, 3}})}}}, 4);
  append.without_slots = true;
  append.rows.slots.resize(1);
  ExpectTheReferencesBytes(append);
  append = AppendOf({{{Coded({{24, 4}}), Coded({{9, 3}})}}}, 4);
  append.without_slots = true;
  ExpectTheReferencesBytes(append);
}

// A stored row may begin at any byte, so the kernel must write in words, pairs
// of bytes or single bytes.
TEST(KvAppendCudaTest, SlotsGivenAsByteOffsetsMayBeginAtAnyByte) {
  for (const DType dtype : kDTypes) {
    Append append = AppendOf({{{{6, {}}, {5, {}}}, dtype}}, 1);
    append.slots_are_bytes = true;
    append.pages = 8;
    const int64_t row = append.parts[0].view.page_bytes;
    append.rows.slots = {0, row + 1, -1, 2 * row + 2, 3 * row + 4, 4 * row + 7};
    ExpectTheReferencesBytes(append);
  }
}

TEST(KvAppendCudaTest, AllPartsCountTheirClampedCodesInTheSameCounter) {
  Append append = AppendOf({{{Coded({{64, 4}})}, DType::kF16, true},
                            {{Coded({{31, 2}, {40, 8}})}, DType::kF16, true}});
  for (float& number : append.rows.numbers) number *= 3.0f;
  const Memory want = AppendByReference(append);
  ASSERT_GT(want.clamped[0], 7);
  ASSERT_GT(want.clamped[1], 7);
  ExpectTheReferencesBytes(append);

  EmulatedTest test(3);
  const DeviceBuffer clamped = test.Put(std::vector<int64_t>{5});
  std::vector<DeviceBuffer> memory;
  std::vector<KvAppendPart> parts;
  for (size_t p = 0; p < 2; ++p) {
    const LatentPartArgs& view = append.parts[p].view;
    const auto put = [&](const auto& bytes) {
      return memory.emplace_back(test.Put(bytes)).data();
    };
    KvAppendPart& side = parts.emplace_back(append.PartOf(p));
    side.part.arena = put(append.Untouched().pages[p]);
    const auto ranges = [&](const float* from) {
      return DevicePtr<const void>(
                 put(std::vector<float>(from, from + RowWidth(view))))
          .as<const float>();
    };
    side.part.static_scale = ranges(view.static_scale);
    side.part.static_minimum = ranges(view.static_minimum);
    side.clamped = clamped.as<int64_t>();
  }
  const auto prepared = Prepare(test.device(), append.Shape(), parts);
  KVASIR_ASSERT_OK(prepared.status());
  const DeviceBuffer rows = test.Put(append.rows.numbers);
  const DeviceBuffer slots = test.Put(append.rows.slots);
  Workspace none(nullptr, 0);
  KVASIR_ASSERT_OK(KvAppend(
      test.stream(), *prepared,
      {rows.as<float>(), slots.as<int64_t>(), append.num_tokens(), nullptr},
      none));
  EXPECT_EQ(test.Get<int64_t>(clamped)[0],
            5 + want.clamped[0] - 7 + want.clamped[1] - 7);
}

// Makes parts of every codec, and the planes of slot metadata. The quantization
// errors of the parts are added up for two units.
Append WithMetadata(int64_t groups, Tiles tiles) {
  const auto of = [&](const GroupShape& shape) {
    return std::vector<GroupShape>(static_cast<size_t>(groups), shape);
  };
  Append append = AppendOf(
      {{of(Coded({{20, 4}, {13, 3}})), DType::kF16, false, 0, tiles},
       {of(Coded({{17, 2}, {9, 5}, {5, 0}})), DType::kF16, true, 0, tiles},
       {of(Coded({{35, 3}})), DType::kBf16, false, 8, tiles},
       {of({6, {}}), DType::kBf16, false, 0, tiles}});
  for (size_t p = 0; p < append.parts.size(); ++p) {
    std::vector<int32_t>& units = append.units.emplace_back();
    for (int64_t g = 0; g < groups; ++g) {
      units.push_back(static_cast<int32_t>((g + static_cast<int64_t>(p)) % 3));
    }
  }
  append.metadata.page_tokens = 16;
  append.metadata.num_units = 3;
  append.metadata.scores_offset = 64;
  append.metadata.positions_offset = 320;
  append.metadata.error_offset[kKeyError] = 520;
  append.metadata.error_offset[kValueError] = 600;
  append.metadata.page_bytes = 704;
  for (int64_t t = 0; t < append.num_tokens(); ++t) {
    append.positions.push_back(t * t + (int64_t{3} << 30));
  }
  return append;
}

TEST(KvAppendCudaTest, SlotMetadataIsStoredExactlyAsByTheReference) {
  for (const Tiles& tiles : kTiles) {
    for (const int64_t groups : {3, 10}) {
      Append append = WithMetadata(groups, tiles);
      ExpectTheReferencesBytes(append);
      append.metadata.error_offset[kKeyError] = -1;
      append.units[1].clear();
      ExpectTheReferencesBytes(append);
    }
  }
}

TEST(KvAppendCudaTest, TheBytesDoNotDependOnTheOrderInWhichThreadsRun) {
  const Append append = WithMetadata(9, kTiles[1]);
  const Memory want = AppendByReference(append);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed, 2 + static_cast<int>(seed % 3));
    EXPECT_TRUE(AppendByKernel(test, append) == want) << seed;
  }
}

TEST(KvAppendCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  // There are more groups than warps in a CTA, so a warp appends several
  // latents. The case without reports is tested too, because the lanes then do
  // not wait for each other between two latents.
  const Append with = WithMetadata(9, {});
  Append without = WithMetadata(9, {});
  without.reports = false;
  without.units.clear();
  without.metadata = {};
  const Memory want = AppendByReference(with);
  const Memory want_without = AppendByReference(without);
  const auto mutants =
      LeaveOutEach("kv_append", kSeeds, [&](EmulatedTest& test) {
        return AppendByKernel(test, with) == want &&
               AppendByKernel(test, without) == want_without;
      });
  EXPECT_EQ(mutants.size(), 5u);
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}

TEST(KvAppendCudaTest, AlignedSlotsAreWrittenInWholeWords) {
  // The codes of 128 channels take 64 bytes. They must be written as words, in
  // whole sectors.
  Append append = AppendOf({{{Coded({{128, 4}})},
                             DType::kF16,
                             true,
                             0,
                             {.slots = 16, .granule_bytes = kGranule}}});
  append.rows.slots.assign(1, 5);
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  AppendByKernel(test, append);
  int64_t requests = 0, bytes = 0;
  for (const AccessCount& access : test.emulator().Accesses("kv_append")) {
    if (access.kind != "global store") continue;
    requests += access.requests;
    bytes += access.bytes;
  }
  EXPECT_EQ(requests, 1);
  EXPECT_EQ(bytes, 64);
}

TEST(KvAppendCudaTest, RefusesALatentThatDoesNotFitInSharedMemory) {
  EmulatedTest test;
  const DeviceBuffer arena = test.Memory(64);
  const auto prepare = [&](int64_t width) {
    const std::vector<CodeRun> runs = {{0, width, 1}};
    LatentGroup group;
    group.width = width;
    group.codes = {0, 8192, 0};
    group.params = {8192, 4, 0};
    group.runs = runs.data();
    group.num_runs = 1;
    LatentPart part;
    part.arena = arena.data();
    part.page_bytes = part.tile_bytes = 8200;
    part.tile_slots = 1;
    part.groups = &group;
    part.num_groups = 1;
    return Prepare(test.device(),
                   KvAppendShape{.row_stride = width, .page_tokens = 1},
                   std::vector<KvAppendPart>{{0, part}})
        .status();
  };
  KVASIR_EXPECT_OK(prepare(49152));
  EXPECT_THAT(
      prepare(49153),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr(
              "kv_append: a latent with 49153 channels stored as codes is "
              "too wide for the GPU kernel, which supports at most 49152")));
}

}  // namespace
}  // namespace kvasir::kernels::emulation
