// Tests paged_attention with every codec, several ranks, and keys and values
// that are absorbed, rebuilt, lifted or read as stored. Also tests windows,
// freed pages, arbitrary positions and whole prompts.
#include <gmock/gmock.h>

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/latents/ops.h"
#include "kernels/rowwise/ops.h"
#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kNoPage = 1 << 30;

// Returns a random seed, which is printed. To repeat a run, set the environment
// variable KVASIR_TEST_SEED to its seed.
uint32_t Seed() {
  static const uint32_t seed = [] {
    const char* given = std::getenv("KVASIR_TEST_SEED");
    const uint32_t chosen =
        given != nullptr
            ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
            : std::random_device()();
    std::printf("KVASIR_TEST_SEED=%u\n", chosen);
    return chosen;
  }();
  return seed;
}

PartSpec OneGroup(PartSpec part) {
  part.group_of_head = {0, 0};
  return part;
}

// Expects the reference's output to be near exact attention, and the output of
// all instruction sets and numbers of threads to have the same bits as the
// reference's.
void ExpectDefinition(LatentCache& cache, const std::vector<LatentAsk>& asks) {
  // The tolerance suits float32 sums of up to 160 products of numbers up to 12.
  // Each product may lose 12 * 2^-24. The largest error seen with any seed is
  // 6.4e-5.
  const std::vector<float> truth = CheckedReference(cache, asks, 1e-4);
  ExpectBits(cache, asks, truth, {&SharedStreams().one, &SharedStreams().many});
}

// ----- Every codec and rank, with every way to read keys and values.

enum class Reads { kAbsorbed, kRebuilt, kAsStored, kLifted };

std::vector<std::pair<const char*, PartSpec>> Codecs(int64_t rank) {
  return {{"f32", Numbers({rank}, DType::kF32)},
          {"f16", Numbers({rank}, DType::kF16)},
          {"bf16", Numbers({rank})},
          {"1 bit", Codes({rank}, {1})},
          {"2 bits", Codes({rank}, {2})},
          {"3 bits", Codes({rank}, {3})},
          {"4 bits", Codes({rank}, {4})},
          {"5 bits", Codes({rank}, {5})},
          {"6 bits", Codes({rank}, {6})},
          {"8 bits", Codes({rank}, {8})},
          {"a schedule", Codes({rank}, {8, 4, 3, 2, 1}, rank / 4)},
          {"static 4 bits", Fixed(Codes({rank}, {4}))},
          {"static runs of rising bits",
           Fixed(Codes({rank}, {4, 8}, std::max<int64_t>(rank / 2, 1)))},
          {"static runs, some unstored",
           Unstored(Codes({rank}, {6, 5, 3, 2}, std::max<int64_t>(rank / 8, 1)),
                    rank / 4)},
          {"levels", Levels(Codes({rank}, {4}))},
          {"levels of 3 bits", Levels(Codes({rank}, {3}))}};
}

// Returns `codec` as a key part that is read in the given way.
PartSpec KeysOf(PartSpec codec, Reads reads) {
  const int64_t rank = codec.widths[0];
  if (reads == Reads::kRebuilt) codec.rebuild = {32, 16, true};
  if (reads == Reads::kAsStored) {
    codec.rebuild = {rank, rank / 4, false, true, true};
  }
  return codec;
}

class CodecSweepTest : public ::testing::TestWithParam<Reads> {};

TEST_P(CodecSweepTest, EveryCodecMatchesExactAttentionAtEveryRank) {
  uint32_t seed = Seed();
  const int64_t page_tokens[] = {16, 32, 64};
  for (const int64_t rank : {8, 24, 96, 160}) {
    for (const auto& [name, codec] : Codecs(rank)) {
      SCOPED_TRACE(std::string(name) + ", rank " + std::to_string(rank));
      PartSpec values = codec;
      if (GetParam() == Reads::kLifted) {
        values.lift_dims = seed % 2 == 0 ? 32 : 1 + seed % 41;
      }
      LatentSpec spec = SpecOf({KeysOf(codec, GetParam())}, {values});
      if (GetParam() == Reads::kLifted) spec.value_exact = seed % 5 * 9;
      spec.page_tokens = page_tokens[seed % 3];
      LatentCache cache(spec, {70}, seed++);
      cache.Write(0, 0, 70);
      ExpectDefinition(cache, {{0, 68, 2}});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reads, CodecSweepTest,
                         ::testing::Values(Reads::kAbsorbed, Reads::kRebuilt,
                                           Reads::kAsStored, Reads::kLifted));

// Tests every codec with three caps: the lowest changes nearly every score, the
// highest only few. Depending on the seed, there is also a window or a context
// of more than one split. The error of a score is a few units in the last place
// of the cap, which the tolerance allows.
TEST(ScoreCapTest, CappedScoresMatchExactAttentionForEveryCodec) {
  uint32_t seed = Seed();
  for (const float cap : {0.75f, 5.0f, 50.0f}) {
    for (const auto& [name, codec] : Codecs(24)) {
      SCOPED_TRACE(std::string(name) + ", cap " + std::to_string(cap));
      LatentSpec spec = SpecOf(
          {KeysOf(codec, seed % 2 == 0 ? Reads::kAbsorbed : Reads::kRebuilt)},
          {codec});
      spec.score_cap = cap;
      if (seed % 3 == 0) spec.window = 50;
      const int64_t context = seed % 5 == 0 ? kAttentionSplitSlots + 9 : 150;
      LatentCache cache(spec, {context}, seed++);
      cache.Write(0, 0, context);
      ExpectDefinition(cache, {{0, context - 5, 5}});
    }
  }
}

// With this seed, the terms of one output number cancel almost completely, so
// its error is large relative to the number itself.
TEST(WorstErrorTest,
     AnOutputWhoseTermsCancelAlmostCompletelyIsWithinTheTolerance) {
  PartSpec values = Lifted(Codes({96}, {8}), 1);
  LatentSpec spec = SpecOf({Codes({96}, {8})}, {values});
  spec.value_exact = 18;
  spec.page_tokens = 64;
  LatentCache cache(spec, {70}, 360402587);
  cache.Write(0, 0, 70);
  ExpectDefinition(cache, {{0, 68, 2}});
}

struct Heads {
  int64_t queries;
  std::vector<int32_t> group_of_head;  // one for each KV head
};

class ContextSweepTest
    : public ::testing::TestWithParam<std::tuple<Reads, int64_t>> {};

// The tested token comes after 0 or 1 slots, after about as many as a block has
// (63 to 65), or after more than a split has.
TEST_P(ContextSweepTest,
       AttentionIsCorrectForEveryContextLengthAndGroupingOfHeads) {
  const Reads reads = std::get<0>(GetParam());
  const int64_t context = std::get<1>(GetParam());
  const Heads shapes[] = {{4, {0, 0}}, {8, {0}}, {3, {0, 1, 0}}};
  const PartSpec codecs[] = {Numbers({24}), Codes({24}, {4}, 8),
                             Codes({24}, {8, 4, 3, 2, 1}, 6)};
  uint32_t seed = Seed();
  // The context length determines which codec is tested with which shape.
  auto codec = static_cast<size_t>(context);
  for (const Heads& heads : shapes) {
    PartSpec part = codecs[codec++ % 3];
    part.group_of_head = heads.group_of_head;
    PartSpec values = part;
    if (reads == Reads::kLifted) values.lift_dims = 20;
    LatentSpec spec = SpecOf({KeysOf(part, reads)}, {values});
    spec.num_heads = heads.queries;
    spec.num_kv_heads = static_cast<int64_t>(heads.group_of_head.size());
    SCOPED_TRACE(heads.queries);
    LatentCache cache(spec, {context + 1}, seed++);
    cache.Write(0, 0, context + 1);
    ExpectDefinition(cache, {{0, context, 1}});
  }
}

INSTANTIATE_TEST_SUITE_P(
    ReadsAndContexts, ContextSweepTest,
    ::testing::Combine(::testing::Values(Reads::kAbsorbed, Reads::kRebuilt,
                                         Reads::kAsStored, Reads::kLifted),
                       ::testing::Values(0, 1, 63, 64, 65, 1000)));

// ----- Slots that are not visible.

struct View {
  int64_t length;
  int64_t window;
  bool causal;
  int64_t dead_pages;
};

class VisibilityTest : public ::testing::TestWithParam<View> {};

// The block table entries of freed pages are invalid, so a read of their slots
// would crash.
TEST_P(VisibilityTest, OnlyVisibleSlotsAreRead) {
  const View& view = GetParam();
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  const std::vector<LatentSpec> specs = {
      SpecOf({Rebuilt(OneGroup(Codes({24}, {4}, 8)), {16, 8, true})},
             {Codes({24}, {3})}),
      SpecOf({Rebuilt(Fixed(Codes({40}, schedule, 8)), {16, 8})},
             {Fixed(Codes({24}, {2}))}),
      SpecOf({Fixed(Codes({24}, {8}))}, {OneGroup(Codes({40}, schedule, 8))}),
      SpecOf({Rebuilt(Codes({16}, {4}), {16, 4, true, true})}, {Numbers({33})}),
      SpecOf({Numbers({24}), Rebuilt(Codes({40}, {8}), {16, 8})},
             {Numbers({24}, DType::kF32), Codes({40}, {1}, 20)}),
      SpecOf({OneGroup(Numbers({24}))},
             {Lifted(OneGroup(Codes({40}, schedule, 8)), 20)})};
  uint32_t seed = Seed();
  for (LatentSpec spec : specs) {
    SCOPED_TRACE(seed);
    spec.window = view.window;
    spec.causal = view.causal;
    LatentCache cache(spec, {view.length, 40}, seed++);
    cache.Write(0, 0, view.length);
    cache.Write(1, 0, 40);
    for (int64_t i = 0; i < view.dead_pages; ++i) {
      cache.table(0)[static_cast<size_t>(i)] = kNoPage;
    }
    ExpectDefinition(cache,
                     {{0, view.length - 2, 2, view.dead_pages}, {1, 37, 3}});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Views, VisibilityTest,
    ::testing::Values(View{200, 40, true, 0}, View{200, 40, true, 9},
                      View{200, 0, true, 3}, View{200, 0, false, 3},
                      View{200, 70, false, 7},
                      // Here a row sees more slots than a split has, and the
                      // first slot that it sees is in the middle of a split.
                      View{1300, 600, true, 40}));

TEST(GonePagesTest, RowsWhoseVisiblePagesAreAllFreedHaveZeroOutput) {
  const LatentSpec spec =
      SpecOf({Rebuilt(Codes({24}, {4}), {16, 8})}, {Fixed(Codes({24}, {4}))});
  LatentCache cache(spec, {40}, 40);
  cache.Write(0, 0, 40);
  cache.table(0)[0] = kNoPage;
  cache.table(0)[1] = kNoPage;
  ExpectDefinition(cache, {{0, 10, 1, 2}, {0, 30, 4, 2}});
}

TEST(EmptySequenceTest, AnEmptySequenceDoesNotAffectOtherSequences) {
  LatentCache cache(
      SpecOf({Rebuilt(Codes({24}, {4}), {16, 8})}, {Codes({24}, {4})}),
      {70, 20}, 41);
  cache.Write(0, 0, 70);
  const std::vector<LatentAsk> alone = {{0, 60, 3}};
  const std::vector<LatentAsk> beside = {{1, 0, 0}, {0, 60, 3}, {1, 5, 0}};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    for (const int threads : {1, 16}) {
      TestStream test(threads, backend);
      EXPECT_TRUE(
          SameBits(cache.Attend(test, alone), cache.Attend(test, beside)));
    }
  }
}

// ----- Positions.

struct Positions {
  const char* name;
  int64_t (*of)(int64_t slot);
};

class PositionsTest : public ::testing::TestWithParam<Positions> {};

TEST_P(PositionsTest, EveryKeyIsRotatedByThePositionOfItsSlot) {
  const std::vector<LatentSpec> specs = {
      SpecOf({Rebuilt(Codes({24}, {4}, 8), {32, 16, true})}, {Numbers({24})}),
      SpecOf({Rebuilt(Numbers({40}), {40, 12, false, true, true, 1.25f})},
             {Numbers({24})})};
  uint32_t seed = Seed();
  for (LatentSpec spec : specs) {
    spec.position_of = GetParam().of;
    LatentCache cache(spec, {150}, seed++);
    cache.Write(0, 0, 150);
    ExpectDefinition(cache, {{0, 50, 1}, {0, 147, 3}});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Orders, PositionsTest,
    ::testing::Values(
        Positions{"Gaps", [](int64_t s) { return 7 * s + s * s; }},
        Positions{"OutOfOrder", [](int64_t s) { return s * 97 % 151; }},
        Positions{"Backwards", [](int64_t s) { return 1000 - s; }},
        Positions{"Repeated", [](int64_t s) { return s / 9; }},
        Positions{"AllTheSame", [](int64_t) { return int64_t{12345}; }},
        Positions{"Across131072", [](int64_t s) { return 131000 + s; }},
        Positions{"Across2To31",
                  [](int64_t s) { return (int64_t{1} << 31) - 300 + 4 * s; }},
        Positions{"Above2To32",
                  [](int64_t s) { return (int64_t{5} << 30) + 1000003 * s; }}),
    [](const auto& positions) { return std::string(positions.param.name); });

// ----- Whole prompts, whose units have one KV head.

TEST(PromptTest, PromptsOfSeveralPanelsHaveTheSameBitsAsTheReference) {
  constexpr int64_t kRows = 140;
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  const std::vector<LatentSpec> specs = {
      SpecOf({Rebuilt(OneGroup(Numbers({24})), {16, 8, true})},
             {OneGroup(Numbers({24}))}),
      SpecOf({Rebuilt(OneGroup(Codes({40}, {4, 3}, 20)), {16, 8})},
             {OneGroup(Codes({24}, {4}, 8))}),
      SpecOf(
          {Rebuilt(OneGroup(Fixed(Codes({24}, schedule, 5))), {16, 4, true})},
          {OneGroup(Fixed(Codes({24}, {4})))}),
      SpecOf(
          {Rebuilt(OneGroup(Codes({16}, {8}, 8)), {16, 8, true, true, true})},
          {OneGroup(Codes({24}, {1}))}),
      SpecOf({OneGroup(Codes({24}, {4}, 8))},
             {Lifted(OneGroup(Numbers({24})), 16)}),
      SpecOf({Rebuilt(OneGroup(Codes({24}, {4})), {16, 8}), Codes({8}, {2})},
             {Lifted(OneGroup(Codes({40}, {4, 3}, 20)), 19), Codes({8}, {3})})};
  uint32_t seed = Seed();
  for (LatentSpec spec : specs) {
    SCOPED_TRACE(seed);
    // Depending on the seed, the layer has a sliding window, exact slots, both
    // or neither.
    if (seed % 3 == 0) spec.window = 50;
    if (seed % 3 == 1) spec.key_exact = 70;
    if (seed % 2 == 1) spec.value_exact = 20;
    if (seed % 4 < 2) spec.sinks = 3 + 67 * (seed % 2);
    LatentCache cache(spec, {kRows, 30}, seed++);
    cache.Write(0, 0, kRows);
    cache.Write(1, 0, 30);
    AttentionSequence sequence;
    sequence.num_rows = kRows;
    PagedAttentionArgs params = cache.Params();
    params.sequences = &sequence;
    params.num_sequences = 1;
    const AttentionGrid grid(params);
    EXPECT_EQ(2, grid.CutOf(sequence).num_slices);
    EXPECT_EQ(1, grid.CutOf(sequence).num_tiles);
    AttentionUnit unit;
    EXPECT_TRUE(UnitCursor(grid).MoveTo(0, &unit));
    EXPECT_LT(1, grid.PanelsOf(unit));
    sequence.num_rows = 1;
    EXPECT_EQ(1, grid.CutOf(sequence).num_slices);
    const std::vector<LatentAsk> asks = {{0, 0, kRows}, {1, 29, 1}};
    AttentionStreams& streams = SharedStreams();
    ExpectBits(cache, asks, cache.Attend(streams.reference, asks),
               {&streams.one, &streams.three});
  }
}

// A prompt of several panels and splits must have the same bits as its parts,
// one of which is a single row.
TEST(PromptTest, ComputingAPromptInPartsDoesNotChangeTheBitsOfItsOutput) {
  constexpr int64_t kRows = 700;
  LatentSpec spec = SpecOf({Rebuilt(OneGroup(Codes({24}, {4}, 8)), {16, 8})},
                           {Lifted(OneGroup(Codes({24}, {8, 3}, 12)), 16)});
  spec.value_exact = 30;
  spec.sinks = 5;
  LatentCache cache(spec, {kRows}, Seed());
  cache.Write(0, 0, kRows);
  TestStream& three = SharedStreams().three;
  const std::vector<float> whole =
      cache.Attend(SharedStreams().one, {{0, 0, kRows}});
  EXPECT_TRUE(SameBits(whole, cache.Attend(three, {{0, 0, kRows}})));
  const auto columns = static_cast<int64_t>(whole.size()) / kRows;
  const auto part = [&](int64_t begin, int64_t count) {
    return std::vector<float>(whole.begin() + begin * columns,
                              whole.begin() + (begin + count) * columns);
  };
  for (const LatentAsk& ask : std::vector<LatentAsk>{
           {0, 0, 300}, {0, 300, 290}, {0, 590, 1}, {0, 591, 109}}) {
    EXPECT_TRUE(
        SameBits(part(ask.start, ask.count), cache.Attend(three, {ask})))
        << ask.start;
  }
  EXPECT_TRUE(SameBits(part(690, 2),
                       cache.Attend(SharedStreams().reference, {{0, 690, 2}})));
}

// ----- Workspace.

// Computes attention for one row after context - 1 slots. The block table
// repeats a few pages, so that a long context needs little memory.
absl::Status AttendOver(LatentCache& cache, int64_t context, TestStream& test,
                        Workspace& workspace) {
  PagedAttentionArgs params = cache.Params();
  std::vector<int32_t> table;
  while (static_cast<int64_t>(table.size()) * params.page_tokens < context) {
    table.insert(table.end(), cache.table(0).begin(), cache.table(0).end());
  }
  AttentionSequence sequence;
  sequence.num_rows = 1;
  sequence.first_slot = context - 1;
  sequence.block_table = OnDevice(table.data());
  const std::vector<float> q = RandomFloats(params.q_row_stride, 71);
  std::vector<float> out(static_cast<size_t>(params.out_row_stride));
  params.q = q.data();
  params.out = out.data();
  params.sequences = &sequence;
  params.num_sequences = 1;
  return AttendOnDevice(test, params, workspace);
}

TEST(WorkspaceRunTest,
     TheCountedWorkspaceSufficesForAnyContextAndNumberOfThreads) {
  for (const LatentSpec& spec :
       {SpecOf({Rebuilt(OneGroup(Codes({24}, {4}, 8)), {16, 8})},
               {OneGroup(Codes({24}, {4}))}),
        SpecOf({Codes({24}, {3})}, {Codes({24}, {8})}),
        SpecOf({Numbers({32})}, {Numbers({32})})}) {
    LatentCache cache(spec, {64}, 70);
    cache.Write(0, 0, 64);
    for (const int threads : {1, 3}) {
      std::vector<size_t> bytes;
      for (const int64_t context : {1 << 10, 1 << 16}) {
        Workspace counter = Workspace::Counting();
        TestStream stream(threads, CpuBackend::kSimd, 0);
        KVASIR_EXPECT_OK(AttendOver(cache, context, stream, counter));
        bytes.push_back(counter.peak_bytes());
        TestStream enough(threads, CpuBackend::kSimd,
                          bytes.back() + Workspace::kAlignmentBytes);
        KVASIR_EXPECT_OK(
            AttendOver(cache, context, enough, enough.workspace()));
        TestStream less(threads, CpuBackend::kSimd, bytes.back() - 1);
        EXPECT_THAT(AttendOver(cache, context, less, less.workspace()),
                    base::StatusIs(absl::StatusCode::kResourceExhausted,
                                   HasSubstr("bytes are needed, but only")));
      }
      EXPECT_EQ(bytes[0], bytes[1]);
    }
  }
}

// ----- Keys of which only some rotation pairs are stored.

// Layers whose KV heads store only some pairs of the key. These are either the
// pairs that pruning kept, or lifted complex channels, several of which may use
// the same pair.
struct PairCase {
  // pairs[j][c] is the pair of the whole key to which channel c of KV head
  // j belongs.
  std::vector<std::vector<int32_t>> pairs;
  bool lifted;
};

class PairChannelsTest : public ::testing::TestWithParam<PairCase> {
 protected:
  using Complex = std::complex<double>;
  static constexpr int64_t kPairs = 16;
  static constexpr int64_t kQueries = 2;
  static constexpr int64_t kTokens = 70;
  static constexpr int64_t kRows = 3;
  static constexpr int64_t kPageTokens = 16;
  static constexpr int64_t kPages = 5;
  static constexpr int64_t kValues = 8;
  static constexpr float kScale = 0.2f;

  PairChannelsTest() {
    for (size_t j = 0; j < GetParam().pairs.size(); ++j) {
      const std::vector<int32_t>& pairs = GetParam().pairs[j];
      const auto count = static_cast<int64_t>(pairs.size());
      ups_.push_back(RandomFloats(2 * count, static_cast<uint32_t>(80 + j)));
      channels_.push_back({count, pairs.data(),
                           GetParam().lifted ? ups_.back().data() : nullptr});
      key_heads_.push_back({key_width_, count, pairs.data()});
      for (int64_t i = 0; i < kQueries; ++i) {
        query_heads_.push_back({query_width_, count, pairs.data()});
        column_in_.push_back(static_cast<int64_t>(column_in_.size()) * 2 *
                             kPairs);
        column_lifted_.push_back(query_width_);
        column_out_.push_back(static_cast<int64_t>(column_out_.size()) *
                              kValues);
        query_width_ += 2 * count;
      }
      key_width_ += 2 * count;
      group_of_head_.push_back(static_cast<int32_t>(j));
    }
    latents_ = RandomFloats(kTokens * key_width_, 90);
    values_ = RandomFloats(kTokens * NumKvHeads() * kValues, 91);
    queries_ = RandomFloats(kRows * NumHeads() * 2 * kPairs, 92);
    for (int64_t f = 0; f < kPairs; ++f) {
      radians_.push_back(std::pow(
          10000.0, -static_cast<double>(f) / static_cast<double>(kPairs)));
      steps_.push_back(RopeStep(radians_.back()));
    }
    for (int64_t t = 0; t < kTokens; ++t) positions_.push_back(1000 + 3 * t);
  }

  int64_t NumKvHeads() const { return static_cast<int64_t>(ups_.size()); }
  int64_t NumHeads() const { return NumKvHeads() * kQueries; }

  // A cache of the keys (or values) of all tokens, as float32 numbers in pages.
  struct Side {
    LatentPartArgs part;
    std::vector<LatentGroup> groups;
    std::vector<float> memory;
    int64_t width = 0;

    explicit Side(const std::vector<int64_t>& widths) {
      for (const int64_t each : widths) {
        LatentGroup group;
        group.width = each;
        group.column = width;
        group.codes.offset_bytes = width * kPageTokens * 4;
        group.codes.stride_bytes = each * 4;
        groups.push_back(group);
        width += each;
      }
      part.dtype = DType::kF32;
      part.groups = groups.data();
      part.num_groups = static_cast<int64_t>(groups.size());
      part.page_bytes = width * kPageTokens * 4;
      part.tile_bytes = part.page_bytes;
      part.tile_slots = kPageTokens;
      memory.assign(static_cast<size_t>(width * kPageTokens * kPages), kPoison);
      part.arena = memory.data();
    }
  };

  void Turn(TestStream& test, const std::vector<RopeHead>& heads,
            int64_t stride, int64_t first_token,
            std::vector<float>* rows) const {
    RopeParams shape;
    shape.q.row_stride = stride;
    shape.rotary_dim = 2 * kPairs;
    const auto rope = Prepare(test.device(), shape, {heads, {}, steps_});
    KVASIR_EXPECT_OK(rope.status());
    KVASIR_EXPECT_OK(Rope(test.stream(), *rope,
                          {OnDevice(rows->data()), nullptr,
                           OnDevice(positions_.data() + first_token),
                           static_cast<int64_t>(rows->size()) / stride},
                          test.workspace()));
  }

  std::vector<float> LiftedQueries(TestStream& test) const {
    std::vector<float> y(static_cast<size_t>(kRows * query_width_), kPoison);
    ComplexLiftParams shape;
    shape.x_row_stride = NumHeads() * 2 * kPairs;
    shape.y_row_stride = query_width_;
    shape.num_pairs = kPairs;
    shape.pairing = RopePairing::kInterleaved;
    std::vector<ComplexChannels> channels;
    for (const ComplexChannelsArgs& each : channels_) {
      channels.push_back(OnDevice(each));
    }
    const auto lift =
        Prepare(test.device(), shape, channels, {column_in_, column_lifted_});
    KVASIR_EXPECT_OK(lift.status());
    KVASIR_EXPECT_OK(ComplexLift(test.stream(), *lift,
                                 {.x = OnDevice(queries_.data()),
                                  .y = OnDevice(y.data()),
                                  .num_rows = kRows},
                                 test.workspace()));
    Turn(test, query_heads_, query_width_, kTokens - kRows, &y);
    return y;
  }

  // Computes what a layer computes: rotates and appends latents, lifts and
  // rotates queries, and computes attention.
  std::vector<float> Run(TestStream& test) const {
    std::vector<int64_t> widths;
    for (const RopeHead& head : key_heads_)
      widths.push_back(2 * head.num_pairs);
    Side keys(widths);
    Side values(std::vector<int64_t>(widths.size(), kValues));
    std::vector<float> turned = latents_;
    Turn(test, key_heads_, key_width_, 0, &turned);
    const std::vector<int32_t> table = {3, 0, 4, 1, 2};
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < kTokens; ++t) {
      slots.push_back(table[static_cast<size_t>(t / kPageTokens)] *
                          kPageTokens +
                      t % kPageTokens);
    }
    const auto append = [&](const std::vector<float>& rows, const Side& side) {
      const auto prepared = Prepare(
          test.device(),
          KvAppendShape{.row_stride = side.width, .page_tokens = kPageTokens},
          std::vector<KvAppendPart>{{0, OnDevice(side.part), nullptr}});
      KVASIR_EXPECT_OK(prepared.status());
      KVASIR_EXPECT_OK(
          KvAppend(test.stream(), *prepared,
                   {OnDevice(rows.data()), OnDevice(slots.data()), kTokens},
                   test.workspace()));
    };
    append(turned, keys);
    append(values_, values);

    const std::vector<float> q = LiftedQueries(test);
    std::vector<float> out(static_cast<size_t>(kRows * NumHeads() * kValues),
                           kPoison);
    const AttentionKeyPartArgs key = {keys.part, group_of_head_.data(),
                                      column_lifted_.data(), nullptr};
    const AttentionValuePartArgs value = {values.part, group_of_head_.data(),
                                          column_out_.data()};
    AttentionSequence sequence;
    sequence.num_rows = kRows;
    sequence.first_slot = kTokens - kRows;
    sequence.block_table = OnDevice(table.data());
    PagedAttentionArgs params;
    params.q = q.data();
    params.q_row_stride = query_width_;
    params.out = out.data();
    params.out_row_stride = NumHeads() * kValues;
    params.num_heads = NumHeads();
    params.num_kv_heads = NumKvHeads();
    params.keys = &key;
    params.num_key_parts = 1;
    params.values = &value;
    params.num_value_parts = 1;
    params.page_tokens = kPageTokens;
    params.sequences = &sequence;
    params.num_sequences = 1;
    params.scale = kScale;
    KVASIR_EXPECT_OK(AttendOnDevice(test, params, test.workspace()));
    return out;
  }

  Complex Turned(Complex number, int64_t pair, int64_t token) const {
    return number *
           std::polar(1.0, radians_[static_cast<size_t>(pair)] *
                               static_cast<double>(
                                   positions_[static_cast<size_t>(token)]));
  }
  // Returns pair `pair` of the whole key that the stored channels represent,
  // before rotation.
  Complex KeyPair(int64_t kv_head, int64_t pair, int64_t token) const {
    const ComplexChannelsArgs& channels =
        channels_[static_cast<size_t>(kv_head)];
    const float* latent = latents_.data() + token * key_width_ +
                          key_heads_[static_cast<size_t>(kv_head)].begin;
    Complex sum = 0.0;
    for (int64_t c = 0; c < channels.num_channels; ++c) {
      if (channels.pairs[c] != pair) continue;
      const Complex number(
          static_cast<double>(latent[c]),
          static_cast<double>(latent[channels.num_channels + c]));
      sum +=
          channels.up == nullptr
              ? number
              : number * Complex(static_cast<double>(channels.up[c]),
                                 static_cast<double>(
                                     channels.up[channels.num_channels + c]));
    }
    return sum;
  }

  double Score(int64_t row, int64_t head, int64_t slot) const {
    const float* q = queries_.data() + (row * NumHeads() + head) * 2 * kPairs;
    double score = 0.0;
    for (int64_t f = 0; f < kPairs; ++f) {
      const Complex query = Turned(
          {static_cast<double>(q[2 * f]), static_cast<double>(q[2 * f + 1])}, f,
          kTokens - kRows + row);
      const Complex key = Turned(KeyPair(head / kQueries, f, slot), f, slot);
      score += std::real(query * std::conj(key));
    }
    return score * static_cast<double>(kScale);
  }

  void ExpectRow(int64_t row, int64_t head, const float* out) const {
    double sum = 0.0;
    std::vector<double> expected(kValues);
    for (int64_t s = 0; s <= kTokens - kRows + row; ++s) {
      const double weight = std::exp(Score(row, head, s));
      sum += weight;
      const float* value =
          values_.data() + (s * NumKvHeads() + head / kQueries) * kValues;
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] += weight * static_cast<double>(value[i]);
      }
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(expected[i] / sum, static_cast<double>(out[i]), 1e-5);
    }
  }

  std::vector<std::vector<float>> ups_;
  std::vector<ComplexChannelsArgs> channels_;
  std::vector<RopeHead> key_heads_;
  std::vector<RopeHead> query_heads_;
  std::vector<int64_t> column_in_;
  std::vector<int64_t> column_lifted_;
  std::vector<int64_t> column_out_;
  std::vector<int32_t> group_of_head_;
  std::vector<double> radians_;
  std::vector<uint64_t> steps_;
  std::vector<int64_t> positions_;
  std::vector<float> latents_;
  std::vector<float> values_;
  std::vector<float> queries_;
  int64_t key_width_ = 0;
  int64_t query_width_ = 0;
};

TEST_P(PairChannelsTest, AttentionOverStoredPairsEqualsAttentionOverWholeKeys) {
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<float> truth = Run(reference);
  for (int64_t i = 0; i < kRows * NumHeads(); ++i) {
    ExpectRow(i / NumHeads(), i % NumHeads(), truth.data() + i * kValues);
  }
  TestStream three(3);
  ForEachSimdTarget([&] { EXPECT_TRUE(SameBits(truth, Run(three))); });
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, PairChannelsTest,
    ::testing::Values(
        PairCase{{{1, 2, 5, 8, 13}, {0, 3, 4, 6, 7, 9, 10, 15}}, false},
        PairCase{{{0, 0, 1, 5, 5, 5, 15}, {2, 3, 3, 4, 7, 8, 9, 9, 14}},
                 true}));

class RefusalTest : public ::testing::Test {
 protected:
  RefusalTest()
      : cache_(SpecOf({Codes({24}, {4})}, {Numbers({24})}), {32}, 95),
        params_(cache_.Params()),
        key_(params_.keys[0]),
        value_(params_.values[0]),
        key_groups_{key_.latents.groups[0], key_.latents.groups[1]},
        value_groups_{value_.latents.groups[0], value_.latents.groups[1]} {
    key_.latents.groups = key_groups_;
    value_.latents.groups = value_groups_;
    params_.keys = &key_;
    params_.values = &value_;
  }

  void Expect(const char* text) { ExpectRefusal(params_, text); }

  LatentCache cache_;
  PagedAttentionArgs params_;
  AttentionKeyPartArgs key_;
  AttentionValuePartArgs value_;
  LatentGroup key_groups_[2];
  LatentGroup value_groups_[2];
};

TEST_F(RefusalTest, RefusesRegionsWhoseSlotsOverlap) {
  key_groups_[1].codes.stride_bytes = 11;
  Expect("codes.stride_bytes: must be at least 12, but is 11");
  key_groups_[1].codes.stride_bytes = 12;
  key_groups_[1].params.stride_bytes = 2;
  Expect("params.stride_bytes: must be at least 4, but is 2");
  key_groups_[1].params.stride_bytes = 4;
  value_groups_[0].codes.stride_bytes = 46;
  Expect("codes.stride_bytes: must be at least 48, but is 46");
}

TEST_F(RefusalTest, RefusesRegionsThatAreMisalignedOrOutsideTheTile) {
  key_groups_[0].codes.offset_bytes = -8;
  Expect("codes.offset_bytes: must be at least 0, but is -8");
  key_groups_[0].codes.offset_bytes = key_.latents.tile_bytes - 16 * 12 + 1;
  Expect("tile_bytes: must be at least ");
  key_groups_[0] = key_groups_[1];
  key_groups_[0].params.offset_bytes = key_.latents.tile_bytes - 16 * 4 + 2;
  Expect("tile_bytes: must be at least ");
  key_groups_[0] = key_groups_[1];
  value_groups_[0].codes.offset_bytes += 1;
  Expect("multiples of 2 bytes, but one of them is ");
}

TEST_F(RefusalTest, IncompleteOrUnusedStaticRangesAreRefused) {
  const std::vector<float> ranges(48, 1.0f);
  key_.latents.static_scale = ranges.data();
  Expect("static ranges must have both scales and minima, or neither");
  key_.latents.static_scale = nullptr;
  key_.latents.static_minimum = ranges.data();
  Expect("static ranges must have both scales and minima, or neither");
  key_.latents.static_minimum = nullptr;
  value_.latents.static_scale = ranges.data();
  value_.latents.static_minimum = ranges.data();
  Expect("group 0 has static ranges, but no codes");
}

TEST_F(RefusalTest, RefusesSequencesWithNegativeCounts) {
  AttentionSequence sequence;
  params_.sequences = &sequence;
  params_.num_sequences = 1;
  const std::pair<int64_t AttentionSequence::*, const char*> counts[] = {
      {&AttentionSequence::first_row, "first_row"},
      {&AttentionSequence::num_rows, "num_rows"},
      {&AttentionSequence::first_slot, "first_slot"},
      {&AttentionSequence::first_live_index, "first_live_index"}};
  for (const auto& [member, name] : counts) {
    sequence = AttentionSequence();
    sequence.*member = -1;
    Expect(
        (std::string("sequence 0: ") + name + ": must be at least 0, but is -1")
            .c_str());
  }
}

}  // namespace
}  // namespace kvasir::kernels
