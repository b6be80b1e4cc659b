#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

class LatentAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(LatentAttentionTest,
       AllBackEndsGiveTheSameBitsAndAreCloseToExactAttention) {
  // The longest context is longer than a split (512 slots), but only a little
  // if keys are rebuilt or values lifted, because the reference computes these
  // slowly.
  bool rebuilds = false;
  for (const auto* parts : {&GetParam().keys, &GetParam().values}) {
    for (const PartSpec& part : *parts) {
      rebuilds = rebuilds || part.rebuild.dims > 0 || part.lift_dims > 0;
    }
  }
  const int64_t longest = rebuilds ? 520 : 1000;
  LatentCache cache(GetParam(), {1, 65, longest + 1}, 1);
  const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 62, 3}, {2, longest, 1}};
  WriteAll(cache, asks);
  AttentionStreams& streams = SharedStreams();
  // The tolerance suits float32 sums of some hundred products, of which up to
  // nine tenths may cancel between the terms with scales and with minima.
  // Rotation angles are exact to 1e-7.
  const std::vector<float> truth = CheckedReference(cache, asks, 5e-5);
  ExpectBits(cache, asks, truth, {&streams.one, &streams.three, &streams.many});
  const bool sees_all = GetParam().window == 0;
  cache.on_launch = [&](const PagedAttentionArgs& params) {
    const auto takes_splits = [&](int threads) {
      const AttentionGrid grid(params, threads);
      return TakesSplits(grid, grid.sequences());
    };
    EXPECT_FALSE(takes_splits(1));
    EXPECT_FALSE(takes_splits(3));
    EXPECT_EQ(sees_all, takes_splits(16));
  };
  cache.Attend(streams.one, asks);
}

INSTANTIATE_TEST_SUITE_P(Specs, LatentAttentionTest,
                         ::testing::ValuesIn(Specs()), [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

// In the second run, page ids are near the largest int32, so offsets of pages
// exceed 2^40 bytes.
TEST_P(LatentAttentionTest, PagesFarFromTheStartOfTheArenaGiveTheSameBits) {
  const std::vector<LatentAsk> asks = {{0, 62, 3}, {1, 129, 1}};
  std::vector<std::vector<float>> outputs;
  for (const int64_t first_page : {0, INT32_MAX - 10000}) {
    LatentSpec spec = GetParam();
    spec.first_page = spec.first_side_page = first_page;
    LatentCache cache(spec, {65, 130}, 1);
    WriteAll(cache, asks);
    outputs.push_back(cache.Attend(SharedStreams().three, asks));
  }
  EXPECT_TRUE(SameBits(outputs[0], outputs[1]));
}

struct Chunks {
  LatentSpec spec;
  int64_t tokens;
};

class LatentChunkingTest : public ::testing::TestWithParam<Chunks> {};

TEST_P(LatentChunkingTest,
       ChunkSizeBatchSizeAndThreadCountDoNotChangeTheBitsOfARow) {
  const LatentSpec& spec = GetParam().spec;
  const int64_t chunk = GetParam().tokens;
  constexpr int64_t kTokens = 140;
  LatentCache whole(spec, {kTokens, 40}, 2);
  whole.Write(0, 0, kTokens);
  AttentionStreams& streams = SharedStreams();
  const std::vector<float> expected =
      whole.Attend(streams.one, {{0, 0, kTokens}});
  LatentCache chunked(spec, {kTokens, 40}, 2);
  chunked.Write(1, 0, 40);
  const size_t row = expected.size() / kTokens;
  for (int64_t t = 0; t < kTokens; t += chunk) {
    const int64_t count = std::min(chunk, kTokens - t);
    // The cache is written only up to the end of this chunk, so reading a later
    // slot would give NaN.
    chunked.Write(0, t, t + count);
    const std::vector<float> got =
        chunked.Attend(streams.three, {{1, 30, 10}, {0, t, count}});
    const auto same = [&](size_t from, size_t to) {
      return SameBits({got.begin() + static_cast<int64_t>(10 * row), got.end()},
                      {expected.begin() + static_cast<int64_t>(from * row),
                       expected.begin() + static_cast<int64_t>(to * row)});
    };
    ASSERT_TRUE(same(static_cast<size_t>(t), static_cast<size_t>(t + count)))
        << t;
  }
}

std::vector<Chunks> ChunksOf(const LatentSpec& spec) {
  return {{spec, 1}, {spec, 7}, {spec, 64}, {spec, 139}};
}
INSTANTIATE_TEST_SUITE_P(Dense, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(LatentSpec())));
INSTANTIATE_TEST_SUITE_P(Stored, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(Mixed())));
INSTANTIATE_TEST_SUITE_P(Exact, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(MixedExact(30, 45))));
INSTANTIATE_TEST_SUITE_P(ExactOwn, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(MixedExact(1, 1))));
INSTANTIATE_TEST_SUITE_P(
    Sinks, LatentChunkingTest,
    ::testing::ValuesIn(ChunksOf(WithSinks("", 9, MixedExact(30, 0)))));
INSTANTIATE_TEST_SUITE_P(
    SinksOnly, LatentChunkingTest,
    ::testing::ValuesIn(ChunksOf(WithSinks("", 66, MixedExact(0, 0)))));

// Tests launches in which a unit has several clusters of heads, so that it
// reads their latents together (AttentionGrid::AddSets).
class LatentSetsTest : public ::testing::TestWithParam<LatentSpec> {
 protected:
  // Runs attention for one token per sequence, and returns the number of units
  // of each sequence.
  static std::vector<int64_t> UnitsOf(LatentCache& cache, TestStream& test,
                                      const std::vector<LatentAsk>& asks,
                                      int threads, std::vector<float>* out) {
    std::vector<int64_t> units;
    cache.on_launch = [&](const PagedAttentionArgs& params) {
      const AttentionGrid grid(params, threads);
      for (int64_t i = 0; i < params.num_sequences; ++i) {
        units.push_back(grid.CutOf(params.sequences[i]).units());
      }
    };
    *out = cache.Attend(test, asks);
    cache.on_launch = nullptr;
    return units;
  }
  // Returns the number of clusters (sets of heads that share a group). It
  // equals the number of groups of keys, because here no group of values has
  // more heads.
  static int64_t ClustersOf(const LatentSpec& spec) {
    const std::vector<int32_t>& groups = spec.keys[0].group_of_head;
    return groups.empty() ? spec.num_kv_heads
                          : *std::max_element(groups.begin(), groups.end()) + 1;
  }
};

TEST_P(LatentSetsTest,
       ReadingTheLatentsOfSeveralHeadsTogetherDoesNotChangeTheOutputBits) {
  const std::vector<int64_t> contexts = {1,  64,  65, 600, 17, 128,
                                         40, 200, 63, 3,   90, 513};
  LatentCache cache(GetParam(), contexts, 7);
  std::vector<LatentAsk> asks;
  for (size_t s = 0; s < contexts.size(); ++s) {
    const auto sequence = static_cast<int64_t>(s);
    cache.Write(sequence, 0, contexts[s]);
    asks.push_back({sequence, contexts[s] - 1, 1});
  }
  AttentionStreams& streams = SharedStreams();
  std::vector<float> together;
  const std::vector<int64_t> units =
      UnitsOf(cache, streams.one, asks, 1, &together);
  // All contexts together have 1784 slots. A unit may have at most a quarter of
  // this work (446 slots), so contexts longer than that have several units.
  for (size_t s = 0; s < asks.size(); ++s) {
    EXPECT_EQ(units[s] > 1, contexts[s] > 446) << contexts[s];
  }
  std::vector<float> by_three;
  UnitsOf(cache, streams.three, asks, 3, &by_three);
  EXPECT_TRUE(SameBits(together, by_three));
  const size_t row = together.size() / asks.size();
  for (size_t s = 0; s < asks.size(); ++s) {
    std::vector<float> alone;
    // A single sequence has too few heads for sixteen threads, so each cluster
    // is a unit.
    EXPECT_EQ(UnitsOf(cache, streams.many, {asks[s]}, 16, &alone)[0],
              ClustersOf(GetParam()));
    EXPECT_TRUE(
        SameBits({together.begin() + static_cast<int64_t>(s * row),
                  together.begin() + static_cast<int64_t>((s + 1) * row)},
                 alone))
        << s;
  }
}

LatentSpec OfHeads(int64_t kv_heads, int64_t each, PartSpec key,
                   PartSpec value) {
  LatentSpec spec = SpecOf({std::move(key)}, {std::move(value)});
  spec.num_heads = kv_heads * each;
  spec.num_kv_heads = kv_heads;
  spec.page_tokens = 64;
  return spec;
}
LatentSpec Sliding(LatentSpec spec) {
  spec.window = 70;
  return spec;
}
LatentSpec WithWindows(LatentSpec spec) {
  spec.key_exact = 20;
  spec.value_exact = 30;
  return spec;
}
INSTANTIATE_TEST_SUITE_P(
    All, LatentSetsTest,
    ::testing::Values(
        OfHeads(7, 1, Numbers({64}), Numbers({64})),
        OfHeads(5, 4, Numbers({96}, DType::kF16), Numbers({40}, DType::kF32)),
        OfHeads(8, 2, Codes({64}, {4}), Codes({64}, {4})),
        OfHeads(3, 8, Codes({64, 32}, {3, 8}), Codes({24}, {2})),
        OfHeads(6, 1, Groups(Numbers({64}), {0, 0, 1, 1, 2, 2}), Numbers({32})),
        WithWindows(OfHeads(5, 2, Codes({32}, {4}), Codes({32}, {8})))));

// One launch has a prompt, sequences of a few tokens and sequences of one
// token. For some of them, a unit has several clusters of heads; for others,
// only one.
TEST(LatentSetsOfSequencesTest,
     MixingPromptsAndDecodedTokensInOneLaunchDoesNotChangeTheOutputBits) {
  const LatentSpec dense = OfHeads(8, 2, Numbers({64}), Numbers({64}));
  for (const LatentSpec& spec :
       {dense, Sliding(dense),
        OfHeads(8, 2, Codes({64}, {4}), Codes({48}, {8}))}) {
    LatentCache cache(spec, {200, 300, 130, 90, 64, 129}, 8);
    const std::vector<LatentAsk> asks = {{0, 199, 1}, {1, 100, 200},
                                         {2, 126, 4}, {3, 88, 2},
                                         {4, 63, 1},  {5, 120, 9}};
    WriteAll(cache, asks);
    AttentionStreams& streams = SharedStreams();
    std::set<int64_t> slices;
    cache.on_launch = [&](const PagedAttentionArgs& params) {
      const AttentionGrid grid(params, 1);
      for (int64_t i = 0; i < params.num_sequences; ++i) {
        slices.insert(grid.CutOf(params.sequences[i]).num_slices);
      }
    };
    const std::vector<float> together = cache.Attend(streams.one, asks);
    EXPECT_GT(slices.size(), 1u);
    cache.on_launch = nullptr;
    EXPECT_TRUE(SameBits(together, cache.Attend(streams.three, asks)));
    std::vector<float> one_by_one;
    for (const LatentAsk& ask : asks) {
      const std::vector<float> alone = cache.Attend(streams.many, {ask});
      one_by_one.insert(one_by_one.end(), alone.begin(), alone.end());
    }
    EXPECT_TRUE(SameBits(together, one_by_one));
  }
}

// Returns a layer for tests that only make grids. Nothing is written to
// its cache.
LatentSpec TablesOf(int64_t kv_heads, int64_t each) {
  LatentSpec spec;
  spec.num_heads = kv_heads * each;
  spec.num_kv_heads = kv_heads;
  spec.page_tokens = 64;
  spec.tables_only = true;
  return spec;
}

TEST(LatentSetsOfSequencesTest,
     ALongSequenceAmongShortSequencesIsDividedIntoMoreWorkUnits) {
  LatentCache cache(TablesOf(32, 1), {1}, 4);
  PagedAttentionArgs params = cache.Params();
  std::vector<AttentionSequence> sequences(8,
                                           {.num_rows = 1, .first_slot = 1023});
  params.sequences = sequences.data();
  params.num_sequences = 8;
  const auto units = [&](int threads) {
    const AttentionGrid grid(params, threads);
    std::vector<int64_t> of;
    for (const AttentionSequence& sequence : sequences) {
      of.push_back(grid.CutOf(sequence).units());
    }
    return of;
  };
  // For two threads, each of the eight sequences is one unit with all heads,
  // which gives each thread four units.
  EXPECT_EQ(units(2), std::vector<int64_t>(8, 1));
  EXPECT_EQ(units(16), std::vector<int64_t>(8, 8));
  EXPECT_EQ(units(64), std::vector<int64_t>(8, 32));
  // Sequence 3 now has nine tenths of the work.
  sequences[3].first_slot = 65535;
  EXPECT_EQ(units(2), (std::vector<int64_t>{1, 1, 1, 8, 1, 1, 1, 1}));
  // The rows of one head of this prompt already fill whole panels, so each unit
  // has one head.
  sequences[3] = {.num_rows = 512, .first_slot = 0};
  EXPECT_EQ(units(2)[3], 32 * 512 / kAbsorbedRows);
  // If pages are smaller than a block, the latents of neighbouring heads are
  // not adjacent for a whole block. Then each head is a unit of its own. In
  // larger pages they are adjacent.
  params.page_tokens = 32;
  EXPECT_EQ(units(2)[0], 32);
  params.page_tokens = 128;
  EXPECT_EQ(units(2)[0], 1);
}

TEST(LatentSetsOfSequencesTest,
     AllHeadsCanFormOneWorkUnitEvenIfTheirNumberIsNotAPowerOfTwo) {
  LatentCache cache(TablesOf(6, 10), {1}, 4);
  PagedAttentionArgs params = cache.Params();
  const std::vector<AttentionSequence> sequences(
      8, {.num_rows = 1, .first_slot = 1023});
  params.sequences = sequences.data();
  params.num_sequences = 8;
  EXPECT_EQ(AttentionGrid(params, 1).CutOf(sequences[0]).units(), 1);
  EXPECT_EQ(AttentionGrid(params, 8).CutOf(sequences[0]).units(), 6);
}

// Returns the output of the last 8 of `tokens` tokens.
std::vector<float> AttendLast(const LatentSpec& spec, int64_t tokens,
                              TestStream& test) {
  LatentCache cache(spec, {tokens}, 3);
  cache.Write(0, 0, tokens);
  return cache.Attend(test, {{0, tokens - 8, 8}});
}

class LatentPagesTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(LatentPagesTest, PageSizeDoesNotChangeTheBitsOfTheOutput) {
  ExpectSameBitsFor({5, 16, 32, 64}, [](int64_t page_tokens) {
    LatentSpec spec = GetParam();
    spec.page_tokens = page_tokens;
    spec.exact_page_rows = 3 * page_tokens - 8;
    return AttendLast(spec, 1100, SharedStreams().three);
  });
}

// An exact row must be found by the slot number that its token had when it was
// written, but codes by the token's present slot number. The test writes the
// same tokens for several values of `evicted`, so the output must not change.
TEST(LatentExactRowsTest,
     AfterEvictionsExactRowsAreFoundByTheirOriginalSlotNumbers) {
  std::vector<float> first;
  for (const int64_t evicted : {0, 1, 33, 1000}) {
    LatentSpec spec =
        WithWindows(OfHeads(4, 2, Codes({32}, {4}), Codes({32}, {8})));
    spec.sinks = 3;
    spec.evicted = evicted;
    LatentCache cache(spec, {700, 90}, 3);
    cache.Write(0, 0, 700);
    cache.Write(1, 0, 90);
    const std::vector<LatentAsk> asks = {{0, 690, 10}, {1, 89, 1}};
    AttentionStreams& streams = SharedStreams();
    for (TestStream* const stream : {&streams.reference, &streams.three}) {
      const std::vector<float> out = cache.Attend(*stream, asks);
      if (first.empty()) first = out;
      EXPECT_TRUE(SameBits(first, out)) << evicted;
    }
  }
}

LatentSpec InTiles(LatentSpec spec, int64_t slots, int64_t granule_bytes) {
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) {
      part.tile_slots = slots;
      part.granule_bytes = granule_bytes;
    }
  }
  return spec;
}

TEST_P(LatentPagesTest, TileSizeDoesNotChangeTheBitsOfTheOutput) {
  ExpectSameBitsFor({128, 64, 16, 4}, [](int64_t tile_slots) {
    LatentSpec spec = InTiles(GetParam(), tile_slots, 0);
    spec.page_tokens = 128;
    spec.exact_page_rows = 100;
    return AttendLast(spec, 1100, SharedStreams().three);
  });
}

TEST_P(LatentPagesTest, GranuleSizeDoesNotChangeTheBitsOfTheReference) {
  ExpectSameBitsFor({0, 4, 16}, [](int64_t granule_bytes) {
    return AttendLast(InTiles(GetParam(), 8, granule_bytes), 100,
                      *TestStream::InGranules(granule_bytes));
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, LatentPagesTest,
    ::testing::Values(LatentSpec(), Mixed(), MixedExact(64, 100),
                      WithSinks("", 4, MixedExact(0, 0)),
                      WithSinks("", 70, MixedExact(9, 64))));

TEST(LatentPositionsTest,
     PositionsThatEqualTheSlotNumbersGiveTheSameBitsAsNoPositions) {
  LatentSpec spec;
  spec.keys = {Rebuilt(Numbers({24}), {16, 8})};
  TestStream test(1);
  const auto attend = [&] {
    LatentCache cache(spec, {80}, 4);
    cache.Write(0, 0, 80);
    return cache.Attend(test, {{0, 79, 1}});
  };
  const std::vector<float> slots = attend();
  spec.position_of = [](int64_t position) { return position; };
  EXPECT_TRUE(SameBits(slots, attend()));
  // Shifts the positions of all slots, but not the position of the query. So
  // the distances between them change, and with them the output.
  spec.first_position = 1;
  const std::vector<float> next = attend();
  EXPECT_FALSE(SameBits(slots, next));
  spec.first_position = 1000000;
  EXPECT_FALSE(SameBits(next, attend()));
}

// Returns the bytes of workspace that a launch needs for one new token after
// `first_slot` tokens.
size_t WorkspaceBytes(LatentSpec spec, int64_t first_slot) {
  spec.tables_only = true;
  LatentCache cache(spec, {1}, 5);
  PagedAttentionArgs params = cache.Params();
  AttentionSequence sequence;
  sequence.num_rows = 1;
  sequence.first_slot = first_slot;
  params.sequences = &sequence;
  params.num_sequences = 1;
  TestStream test(1);
  Workspace counter = Workspace::Counting();
  KVASIR_EXPECT_OK(AttendOnDevice(test, params, counter));
  return counter.peak_bytes();
}

TEST(LatentWorkspaceTest, WorkspaceIsBoundedForEveryShapeAndContext) {
  std::vector<LatentSpec> specs = Specs();
  for (const int64_t width : {16, 128, 256, 512, 1024, 4096, 8192}) {
    const std::vector<int32_t> all(8, 0);
    LatentSpec spec;
    spec.num_heads = 64;
    spec.num_kv_heads = 8;
    spec.values = {Groups(Codes({width}, {4}, (width + 255) / 256 * 2), all)};
    for (const int64_t dims : {0, 64, 128, 256}) {
      const RebuildSpec rebuild = {dims, dims / 2, true};
      for (const PartSpec& keys :
           {Numbers({width}), Codes({width}, {4}, 64), Codes({width}, {3}),
            Fixed(Codes({width}, {2}, 128))}) {
        spec.keys = {Rebuilt(Groups(keys, all), rebuild)};
        specs.push_back(spec);
        if (dims > 0) {
          spec.keys.push_back(Numbers({dims}));
          specs.push_back(spec);
        }
      }
    }
  }
  const size_t num_stored = specs.size();
  for (size_t i = StoredSpecs().size(); i < num_stored; ++i) {
    specs.push_back(Exact(specs[i].name, 64, 64, specs[i]));
  }
  for (const LatentSpec& spec : specs) {
    const size_t bytes = WorkspaceBytes(spec, 1 << 10);
    EXPECT_GT(bytes, size_t{0}) << spec.name;
    const bool rebuilds =
        std::any_of(spec.keys.begin(), spec.keys.end(),
                    [](const PartSpec& part) { return part.rebuild.dims > 0; });
    const bool lifts =
        std::any_of(spec.values.begin(), spec.values.end(),
                    [](const PartSpec& part) { return part.lift_dims > 0; });
    EXPECT_LE(bytes,
              static_cast<size_t>(kAttentionScratchBytes +
                                  (rebuilds || lifts ? kRowStateBytes : 0)))
        << spec.name;
    EXPECT_EQ(bytes, WorkspaceBytes(spec, 1 << 16)) << spec.name;
  }
}

TEST(LatentRefusalTest, TheErrorNamesTheInvalidField) {
  LatentSpec spec;
  spec.keys = {Rebuilt(Codes({24}, {4}), {16, 8})};
  LatentCache cache(spec, {16}, 6);
  const PagedAttentionArgs good = cache.Params();
  KVASIR_EXPECT_OK(Attend(good));

  PagedAttentionArgs params = good;
  params.num_heads = 3;
  ExpectRefusal(
      params,
      "the number of query heads, 3, must be a multiple of the number "
      "of KV heads, 2, and both must be at least 1");
  params = good;
  params.num_value_parts = 0;
  ExpectRefusal(params, "value parts: must be at least 1, but is 0");
  params = good;
  params.most_partials = -1;
  ExpectRefusal(params, "most_partials: must be at least 0, but is -1");
  params = good;
  params.q_row_stride = 63;
  ExpectRefusal(params, "q_row_stride: must be at least 64, but is 63");

  AttentionKeyPartArgs key = good.keys[0];
  params = good;
  params.keys = &key;
  LatentGroup groups[2] = {key.latents.groups[0], key.latents.groups[1]};
  key.latents.groups = groups;
  groups[1].width = 8193;
  ExpectRefusal(params, "width of a latent: must be 1 to 8192, but is 8193");
  groups[1] = groups[0];
  CodeRun run = {0, 24, 7};
  groups[1].runs = &run;
  ExpectRefusal(params, "run 0: the bits of a code must be 1 to 6 or 8");
  run = {0, 20, 4};
  ExpectRefusal(params,
                "the runs have 20 channels in all, but the latent has 24");
  groups[1] = groups[0];
  const int32_t beyond[2] = {0, 2};
  key.group_of_head = beyond;
  ExpectRefusal(params, "group_of_head of a KV head: must be 0 to 1, but is 2");

  key = good.keys[0];
  KeyRebuildArgs rebuild = *key.rebuild;
  key.rebuild = &rebuild;
  rebuild.dims = 257;
  ExpectRefusal(params, "dims of rebuilt keys: must be 1 to 256, but is 257");
  rebuild = *good.keys[0].rebuild;
  rebuild.up = nullptr;
  ExpectRefusal(
      params,
      "width of a latent that is itself the key: must be 16, but is 24");
  rebuild = *good.keys[0].rebuild;
  rebuild.num_pairs = 9;
  ExpectRefusal(params, "pairs of rebuilt keys: must be 0 to 8, but is 9");
}

TEST(LatentRefusalTest, TheErrorNamesTheInvalidFieldOfAValueLift) {
  LatentSpec spec;
  spec.values = {Lifted(Codes({24}, {4}), 16)};
  LatentCache cache(spec, {16}, 6);
  PagedAttentionArgs params = cache.Params();
  KVASIR_EXPECT_OK(Attend(params));
  AttentionValuePartArgs value = params.values[0];
  params.values = &value;
  ValueLiftArgs lift = *value.lift;
  value.lift = &lift;
  lift.dims = 257;
  ExpectRefusal(params, "dims of lifted values: must be 1 to 256, but is 257");
  lift.dims = 22;
  ExpectRefusal(params, "out_row_stride: must be at least 70, but is 69");
  lift.dims = 16;
  lift.up = nullptr;
  ExpectRefusal(params,
                "the values of a part are lifted, so it must have the matrices "
                "`up`, but has none");
}

TEST(LatentRefusalTest, TheErrorNamesTheInvalidFieldOfExactRows) {
  LatentSpec spec;
  spec.key_exact = 8;
  spec.value_exact = 8;
  LatentCache cache(spec, {16}, 6);
  cache.Write(0, 0, 16);
  cache.Attend(SharedStreams().one, {{0, 15, 1}});
  const PagedAttentionArgs good = cache.Params();
  KVASIR_EXPECT_OK(Attend(good));

  PagedAttentionArgs params = good;
  params.key_exact.window = -1;
  ExpectRefusal(params, "exact window: must be at least 0, but is -1");
  params = good;
  params.value_exact.sinks = -1;
  ExpectRefusal(params, "sinks: must be at least 0, but is -1");
  params = good;
  params.key_exact.ring_rows -= 1;
  ExpectRefusal(params,
                "ring_rows of exact rows: must be at least 7, but is 6");
  params = good;
  params.value_exact.num_segments = 0;
  ExpectRefusal(params, "segments of exact rows: must be at least 1, but is 0");
  params = good;
  params.value_exact.row_bytes = 2;
  ExpectRefusal(params, "row_bytes: must be at least 134, but is 2");
  params.value_exact.row_bytes = 0;  // the check must not divide by 0
  ExpectRefusal(params, "row_bytes: must be at least 1, but is 0");
  std::vector<ExactSegment> segments;
  const auto with = [&](int64_t ExactSegment::*field, int64_t value) {
    segments.assign(good.key_exact.segments,
                    good.key_exact.segments + good.key_exact.num_segments);
    segments[1].*field = value;
    params = good;
    params.key_exact.segments = segments.data();
    return params;
  };
  ExpectRefusal(with(&ExactSegment::rows_per_page, 0),
                "rows_per_page of exact rows: must be at least 1, but is 0");
  ExpectRefusal(with(&ExactSegment::first_page, -1),
                "first_page of exact rows: must be at least 0, but is -1");
  // GPU kernels use negative offsets to mark rows of the launch's own tokens,
  // so arena_bytes must not be negative.
  ExpectRefusal(with(&ExactSegment::arena_bytes, -16),
                "arena_bytes of exact rows: must be at least 0, but is -16");
  ExpectRefusal(
      with(&ExactSegment::first_row, 0),
      "first_row of a segment of exact rows: must be at least 1, but is 0");
  ExpectRefusal(with(&ExactSegment::offset_bytes, -2),
                "offset_bytes of exact rows: must be at least 0, but is -2");
  ExpectRefusal(with(&ExactSegment::page_bytes, 400),
                "a side page of 400 bytes has no room for 3 exact rows of 134 "
                "bytes each, the first at byte 0");
  ExpectRefusal(with(&ExactSegment::offset_bytes, 1 << 20),
                "page_bytes of side pages: must be at least 1048576, but is ");
  // With these numbers, rows times bytes would overflow to a negative number,
  // which a check could take for small enough.
  ExpectRefusal(
      with(&ExactSegment::rows_per_page, std::numeric_limits<int64_t>::max()),
      "has no room for 9223372036854775807 exact rows of 134 bytes");
  ExpectRefusal(with(&ExactSegment::arena_bytes, 3),
                "exact rows must begin at multiples of 2 bytes, but "
                "arena_bytes of segment 1 is 3");
  segments = {good.key_exact.segments[1]};
  params.key_exact.segments = segments.data();
  params.key_exact.num_segments = 1;
  ExpectRefusal(
      params,
      "first_row of the first segment of exact rows: must be 0, but is 2");
  segments.assign(good.value_exact.segments,
                  good.value_exact.segments + good.value_exact.num_segments);
  // Longer rows leave room for only one in a page.
  for (ExactSegment& segment : segments) segment.rows_per_page = 1;
  params = good;
  params.value_exact.segments = segments.data();
  params.value_exact.row_bytes = 135;
  ExpectRefusal(params,
                "exact rows must begin at multiples of 2 bytes, but row_bytes "
                "is 135");

  AttentionValuePartArgs value = good.values[0];
  params = good;
  params.values = &value;
  value.exact = nullptr;
  ExpectRefusal(params,
                "keys or values have exact slots, so each of their parts must "
                "have exact rows, but a part has none");
  ExactRowsArgs rows = *good.values[0].exact;
  value.exact = &rows;
  rows.fresh.num_groups = 1;
  ExpectRefusal(params, "groups of exact rows: must be 2, but is 1");
  rows = *good.values[0].exact;
  rows.fresh.dtype = DType::kF16;
  ExpectRefusal(params,
                "exact rows of new tokens and those in the ring must have the "
                "same number type, but have F16 and ");
  rows = *good.values[0].exact;
  rows.fresh.tile_slots = 0;  // the check must not divide by 0
  ExpectRefusal(params, "tile_slots: must be at least 1, but is 0");
  rows = *good.values[0].exact;
  LatentGroup groups[2] = {rows.ring.groups[0], rows.ring.groups[1]};
  rows.ring.groups = groups;
  groups[1].width = 31;
  ExpectRefusal(params, "width of exact rows: must be 32, but is 31");
  rows = *good.values[0].exact;
  const float scale = 1.0f;
  rows.ring.static_scale = &scale;
  ExpectRefusal(params,
                "exact rows have no codes, so they must not have static "
                "ranges");
}

TEST(LatentRefusalTest, PartsThatTogetherNeedTooMuchScratchMemoryAreRefused) {
  LatentSpec spec;
  spec.num_heads = 1;
  spec.num_kv_heads = 1;
  spec.values.assign(8, Numbers({8192}));
  LatentCache cache(spec, {16}, 7);
  ExpectRefusal(cache.Params(),
                "needs more than 262144 bytes of scratch memory");
}

}  // namespace
}  // namespace kvasir::kernels
