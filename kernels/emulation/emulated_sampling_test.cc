// Tests the kernels of log_softmax, sample and count_tokens: their results must
// equal those of the reference implementation bit by bit, with several seeds
// and odd shapes.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/sampling/ops.h"
#include "kernels/sampling/top_ids_cuda.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
const uint64_t kSeeds = Seeds();

// Rows of `vocab` logits for log_softmax. Each call passes the next `chunk` ids
// of the rows.
struct Scored {
  std::vector<float> logits;
  std::vector<int32_t> targets;
  int64_t vocab;
  int64_t chunk;
};

template <typename Run>
void ForChunks(const Scored& c, const Run& run) {
  for (int64_t begin = 0; begin < c.vocab; begin += c.chunk) {
    LogSoftmaxArgs args;
    args.row_stride = c.vocab;
    args.num_rows = static_cast<int64_t>(c.targets.size());
    args.vocab_begin = begin;
    args.vocab_count = std::min(c.chunk, c.vocab - begin);
    args.last = begin + c.chunk >= c.vocab;
    run(args);
  }
}

std::vector<float> ScoresByReference(const Scored& c) {
  std::vector<float> logprobs(c.targets.size(), kPoison);
  std::vector<LogSoftmaxState> state(c.targets.size());
  TestStream reference(1, CpuBackend::kReference);
  ForChunks(c, [&](LogSoftmaxArgs args) {
    args.logits = c.logits.data() + args.vocab_begin;
    args.targets = c.targets.data();
    args.state = state.data();
    args.logprobs = logprobs.data();
    KVASIR_EXPECT_OK(
        LogSoftmax(reference.stream(), OnDevice(args), reference.workspace()));
  });
  return logprobs;
}

std::vector<float> ScoresByKernel(EmulatedTest& test, const Scored& c) {
  const DeviceBuffer logits = test.Put(c.logits);
  const DeviceBuffer targets = test.Put(c.targets);
  const DeviceBuffer state =
      test.Memory(c.targets.size() * sizeof(LogSoftmaxState));
  const DeviceBuffer logprobs =
      test.Put(std::vector<float>(c.targets.size(), kPoison));
  Workspace none(nullptr, 0);
  ForChunks(c, [&](const LogSoftmaxArgs& args) {
    LogSoftmaxParams params = OnDevice(args);
    params.logits = logits.as<float>() + args.vocab_begin;
    params.targets = targets.as<int32_t>();
    params.state = state.as<LogSoftmaxState>();
    params.logprobs = logprobs.as<float>();
    KVASIR_EXPECT_OK(LogSoftmax(test.stream(), params, none));
  });
  return test.Get<float>(logprobs);
}

TEST(LogSoftmaxCudaTest,
     GivesTheBitsOfTheCpuForAnyDivisionOfTheVocabularyIntoChunks) {
  uint64_t seed = 0;
  for (const int64_t vocab : {1, 15, 1024, 5003, 20000}) {
    std::vector<int32_t> targets;
    for (int64_t i = 0; i < 5; ++i) {
      targets.push_back(static_cast<int32_t>(i * 7919 % vocab));
    }
    targets.push_back(-1);
    targets.push_back(static_cast<int32_t>(vocab));
    Scored c = {RandomFloats(7 * vocab, 1, 5.0f), targets, vocab, vocab};
    const auto want = ScoresByReference(c);
    for (const int64_t chunk : {vocab, int64_t{2048}}) {
      c.chunk = chunk;
      EmulatedTest test(++seed);
      EXPECT_TRUE(SameBits(want, ScoresByKernel(test, c)))
          << vocab << " in chunks of " << chunk;
    }
  }
  EmulatedTest test;
  EXPECT_TRUE(ScoresByKernel(test, {{}, {}, 5, 5}).empty());
}

TEST(LogSoftmaxCudaTest, ANonFiniteLogitMakesTheResultOfItsRowNonFinite) {
  constexpr int64_t kVocab = 2500;
  Scored c = {RandomFloats(2 * kVocab, 2), {3, 3}, kVocab, kVocab};
  EmulatedTest whole;
  const auto want = ScoresByKernel(whole, c);
  for (const auto& [bad, at] : std::vector<std::pair<float, size_t>>{
           {kInf, 0}, {-kInf, 1030}, {kPoison, 2499}}) {
    Scored with_bad = c;
    with_bad.logits[at] = bad;
    EmulatedTest broken;
    const auto got = ScoresByKernel(broken, with_bad);
    EXPECT_FALSE(std::isfinite(got[0])) << bad << " at " << at;
    EXPECT_EQ(got[1], want[1]);
  }
  // In this case, all logits of one block are -infinity.
  c = {std::vector<float>(kVocab, -kInf), {2400}, kVocab, kVocab};
  c.logits[2400] = 1.0f;
  EmulatedTest test;
  EXPECT_FALSE(std::isfinite(ScoresByKernel(test, c)[0]));
}

TEST(LogSoftmaxCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  const Scored c = {RandomFloats(3 * 5003, 3), {1, 2, 3}, 5003, 5003};
  const auto want = ScoresByReference(c);
  const auto mutants =
      LeaveOutEach("log_softmax", kSeeds, [&](EmulatedTest& test) {
        return SameBits(want, ScoresByKernel(test, c));
      });
  EXPECT_EQ(mutants.size(), 3u);
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(mutant.verdict, Verdict::kRight) << mutant.site.line;
  }
}

TEST(LogSoftmaxCudaTest, LogitsAreReadInWholeSectors) {
  const Scored c = {RandomFloats(2 * 4096, 4), {1, 2}, 4096, 4096};
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  (void)ScoresByKernel(test, c);
  int64_t bytes = 0;
  for (const AccessCount& count : test.emulator().Accesses("log_softmax")) {
    if (count.kind != "global load" || count.requests < 10) continue;
    EXPECT_EQ(count.sectors, count.least_sectors) << count.line;
    bytes += count.bytes;
  }
  EXPECT_EQ(bytes, 2 * 2 * 4096 * 4);  // two rows; each logit is read twice
}

// The parameters of a row, with tables in host memory.
struct Row {
  SampleRowArgs row;
  std::vector<int32_t> prompt, output, bias_ids, banned;
  std::vector<float> biases;
  std::vector<uint32_t> mask;
};
Row Greedy() {
  Row row;
  row.row.temperature = 0.0f;
  return row;
}

struct Sampled {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<std::vector<int32_t>> outputs;
  bool operator==(const Sampled& other) const {
    return ids == other.ids && SameBits(logprobs, other.logprobs) &&
           top_ids == other.top_ids &&
           SameBits(top_logprobs, other.top_logprobs) &&
           outputs == other.outputs;
  }
};

struct Batch {
  std::vector<float> logits;
  std::vector<Row> rows;
  int64_t vocab;
  int64_t max_top = 0;
  bool shared = false;  // all rows use the same row of logits
};

Sampled ByReference(Batch c) {
  const size_t count = c.rows.size();
  const size_t top = count * static_cast<size_t>(c.max_top);
  Sampled out = {std::vector<int32_t>(count, -7),
                 std::vector<float>(count, kPoison),
                 std::vector<int32_t>(top, -7),
                 std::vector<float>(top, kPoison),
                 {}};
  std::vector<SampleRowArgs> rows;
  for (Row& from : c.rows) {
    const auto data = [](auto& numbers) {
      return numbers.empty() ? nullptr : numbers.data();
    };
    SampleRowArgs row = from.row;
    row.prompt_counts = data(from.prompt);
    row.output_counts = data(from.output);
    row.bias_ids = data(from.bias_ids);
    row.biases = data(from.biases);
    row.num_biases = static_cast<int32_t>(from.biases.size());
    row.banned_ids = data(from.banned);
    row.num_banned = static_cast<int32_t>(from.banned.size());
    row.allow_mask = data(from.mask);
    rows.push_back(row);
  }
  SampleArgs args;
  args.logits = c.logits.data();
  args.row_stride = c.shared ? 0 : c.vocab;
  args.num_rows = static_cast<int64_t>(count);
  args.vocab = c.vocab;
  args.rows = rows.data();
  args.token_ids = out.ids.data();
  args.logprobs = out.logprobs.data();
  args.max_top = c.max_top;
  args.top_ids = out.top_ids.data();
  args.top_logprobs = out.top_logprobs.data();
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Sample(reference.stream(), OnDevice(args), reference.workspace()));
  for (const Row& row : c.rows) out.outputs.push_back(row.output);
  return out;
}

Sampled ByKernel(EmulatedTest& test, const Batch& c) {
  const size_t count = c.rows.size();
  const size_t top = count * static_cast<size_t>(c.max_top);
  std::vector<DeviceBuffer> tables;
  const auto put = [&](const auto& numbers) {
    using T = typename std::decay_t<decltype(numbers)>::value_type;
    if (numbers.empty()) return DevicePtr<T>();
    tables.push_back(test.Put(numbers));
    return tables.back().template as<T>();
  };
  std::vector<SampleRow> rows;
  std::vector<size_t> output_table(count);
  for (const Row& from : c.rows) {
    SampleRow row = OnDevice(from.row);
    row.prompt_counts = put(from.prompt);
    if (rows.size() % 2 == 1 && row.prompt_counts) {
      // The table begins at an address that is not aligned for wide accesses.
      std::vector<int32_t> behind = {9};
      behind.insert(behind.end(), from.prompt.begin(), from.prompt.end());
      row.prompt_counts = put(behind) + 1;
    }
    output_table[rows.size()] = tables.size();
    row.output_counts = put(from.output);
    row.bias_ids = put(from.bias_ids);
    row.biases = put(from.biases);
    row.num_biases = static_cast<int32_t>(from.biases.size());
    row.banned_ids = put(from.banned);
    row.num_banned = static_cast<int32_t>(from.banned.size());
    row.allow_mask = put(from.mask);
    rows.push_back(row);
  }
  const DeviceBuffer logits = test.Put(c.logits);
  const DeviceBuffer on_rows = test.Put(rows);
  const DeviceBuffer ids = test.Put(std::vector<int32_t>(count, -7));
  const DeviceBuffer logprobs = test.Put(std::vector<float>(count, kPoison));
  const DeviceBuffer top_ids = test.Put(std::vector<int32_t>(top, -7));
  const DeviceBuffer top_logprobs = test.Put(std::vector<float>(top, kPoison));
  SampleParams params;
  params.logits = logits.as<float>();
  params.row_stride = c.shared ? 0 : c.vocab;
  params.num_rows = static_cast<int64_t>(count);
  params.vocab = c.vocab;
  params.rows = on_rows.as<SampleRow>();
  params.token_ids = ids.as<int32_t>();
  params.logprobs = logprobs.as<float>();
  params.max_top = c.max_top;
  params.top_ids = top_ids.as<int32_t>();
  params.top_logprobs = top_logprobs.as<float>();
  const DeviceBuffer scratch =
      test.Memory(static_cast<size_t>(SampleDeviceRowBytes(c.vocab, c.max_top) *
                                      std::max<int64_t>(params.num_rows, 1)));
  Workspace workspace(scratch.data(), scratch.bytes());
  KVASIR_EXPECT_OK(Sample(test.stream(), params, workspace));
  Sampled out = {test.Get<int32_t>(ids),
                 test.Get<float>(logprobs),
                 test.Get<int32_t>(top_ids),
                 test.Get<float>(top_logprobs),
                 {}};
  for (size_t i = 0; i < count; ++i) {
    out.outputs.push_back(c.rows[i].output.empty()
                              ? std::vector<int32_t>()
                              : test.Get<int32_t>(tables[output_table[i]]));
  }
  return out;
}

void ExpectSame(const Batch& c, uint64_t seed = 1) {
  EmulatedTest test(seed);
  const Sampled want = ByReference(c);
  const Sampled got = ByKernel(test, c);
  EXPECT_EQ(want.ids, got.ids);
  EXPECT_TRUE(SameBits(want.logprobs, got.logprobs));
  EXPECT_EQ(want.top_ids, got.top_ids);
  EXPECT_TRUE(SameBits(want.top_logprobs, got.top_logprobs));
  EXPECT_EQ(want.outputs, got.outputs);
}

// Makes `count` rows that together use every sampling setting.
std::vector<Row> AllKinds(int64_t vocab, size_t count) {
  std::vector<Row> rows(count);
  for (size_t i = 0; i < count; ++i) {
    SampleRowArgs& row = rows[i].row;
    row.temperature = i % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(i);
    row.top_k = i % 3 == 0 ? 50 : i % 11 == 1 ? 1000000 : 0;
    row.top_p = i % 2 == 0 ? 0.9f : 1.0f;
    row.min_p = i % 5 == 0 ? 0.02f : 0.0f;
    row.seed = 100 + (uint64_t{i} << 33);
    row.sample_index = static_cast<uint32_t>(i % 3);
    row.position = (uint64_t{i} << 34) + 7;
    row.num_logprobs = static_cast<int32_t>(i % 4) - 1;
    if (i % 3 == 1) {
      row.repetition_penalty = 1.3f;
      row.presence_penalty = 0.4f;
      row.frequency_penalty = i % 2 == 0 ? 0.2f : 0.0f;
      for (int64_t id = 0; id < vocab; ++id) {
        rows[i].prompt.push_back(id % 5 == 0);
        rows[i].output.push_back(id % 3 == 0 ? static_cast<int32_t>(id % 4)
                                             : 0);
      }
    }
    if (i % 4 == 2) {
      rows[i].bias_ids = {3, -1, 5, 3, static_cast<int32_t>(vocab), 515};
      rows[i].biases = {2.0f, 50.0f, -1.0f, 0.25f, 50.0f, 1.0f};
      rows[i].banned = {1, 99, -3, static_cast<int32_t>(vocab) + 4};
    }
    if (i % 6 == 5) {
      rows[i].mask.assign(static_cast<size_t>((vocab + 31) / 32), 0x5a5a5a5au);
    }
  }
  return rows;
}

TEST(SampleCudaTest,
     RowsWithAllKindsOfSamplingOptionsGiveTheSameResultAsTheCpu) {
  uint64_t seed = 0;
  for (const int64_t vocab : {600, 3001}) {
    constexpr size_t kRows = 18;
    ExpectSame({RandomFloats(vocab * static_cast<int64_t>(kRows), 1, 3.0f),
                AllKinds(vocab, kRows), vocab, 2},
               ++seed);
  }
  ExpectSame({{0.5f}, {Row(), Greedy()}, 1, 1, true});
  ExpectSame({{}, {}, 3, 0});
}

// Draws many ids with each filter. With scale 2, few logits are large. With
// scale 0.05, all logits are nearly equal, so filters keep more ids than shared
// memory can hold.
TEST(SampleCudaTest, TheDrawnTokenIdsEqualThoseDrawnOnTheCpu) {
  struct Shape {
    float scale;
    int64_t vocab;
  };
  for (const auto& [scale, vocab] :
       std::vector<Shape>{{2.0f, 37}, {2.0f, 1500}, {0.05f, 2500}}) {
    Batch c = {RandomFloats(vocab, 5, scale), {}, vocab, 0, true};
    for (uint64_t i = 0; i < 24; ++i) {
      Row row;
      row.row.seed = 9;
      row.row.position = i;
      row.row.temperature = i % 2 == 0 ? 1.0f : 0.7f;
      if (i % 8 == 1) row.row.top_k = 5;
      if (i % 8 == 2) row.row.top_p = 0.8f;
      if (i % 8 == 3) row.row.min_p = 0.3f;
      if (i % 8 == 4) row.row.top_p = 0.999f, row.row.min_p = 1e-4f;
      if (i % 8 == 5) row.row.top_k = 20, row.row.top_p = 0.5f;
      if (i % 8 == 6) row.row.top_p = 1e-6f;
      c.rows.push_back(row);
    }
    ExpectSame(c, 3);
  }
}

TEST(SampleCudaTest, AmongTokensWithEqualLogitsTheLowestIdIsTaken) {
  std::vector<float> logits(2000, 1.0f);
  logits[0] = -1.0f;
  logits[700] = -0.0f;
  Batch c = {logits, {Greedy(), Row(), Row()}, 2000, 3, true};
  c.rows[0].row.num_logprobs = 3;
  c.rows[1].row.top_k = 2;
  c.rows[2].row.top_p = 1e-4f;
  ExpectSame(c);
  EmulatedTest test;
  const Sampled got = ByKernel(test, c);
  EXPECT_EQ(got.ids[0], 1);
  EXPECT_EQ(
      (std::vector<int32_t>{1, 2, 3}),
      (std::vector<int32_t>{got.top_ids.begin(), got.top_ids.begin() + 3}));
  // Zeros of either sign are equal.
  ExpectSame({{-0.0f, 0.0f, -0.0f}, {Greedy()}, 3, 0});
  ExpectSame({{0.0f, -0.0f, 0.0f}, {Greedy()}, 3, 0});
}

TEST(SampleCudaTest, NoTokenIsDrawnIfAllIdsAreExcluded) {
  Batch c = {RandomFloats(70, 6), {Row(), Greedy(), Greedy()}, 70, 1, true};
  for (Row& row : c.rows) row.mask.assign(3, 0);
  c.rows[1].row.num_logprobs = 1;
  c.rows[1].output.assign(70, 0);
  c.rows[2].mask.assign(3, ~0u);
  for (int32_t id = 0; id < 70; ++id) c.rows[2].banned.push_back(id);
  ExpectSame(c);
  EmulatedTest test;
  EXPECT_EQ(ByKernel(test, c).ids, (std::vector<int32_t>(3, kNoTokenAllowed)));
}

TEST(SampleCudaTest, ARowWithANonFiniteLogitDrawsNoTokenButOtherRowsDo) {
  constexpr int64_t kVocab = 600;
  for (const auto& [bad, at] : std::vector<std::pair<float, size_t>>{
           {kInf, 0}, {-kInf, 520}, {kPoison, 599}}) {
    Batch c = {RandomFloats(3 * kVocab, 7), {Row(), Row(), Row()}, kVocab, 1};
    c.logits[kVocab + at] = bad;
    for (Row& row : c.rows) {
      row.row.num_logprobs = 1;
      row.output.assign(kVocab, 0);
    }
    ExpectSame(c);
    EmulatedTest test;
    EXPECT_EQ(ByKernel(test, c).ids[1], kLogitNotFinite);
  }
}

TEST(SampleCudaTest, ATokenIsDrawnDespiteInfinitePenaltiesAndBiases) {
  Batch c = {{3.0f, 100.0f, 1.0f, -2.0f}, {}, 4, 0, true};
  for (const float temperature : {0.0f, 1.0f, 1e-38f}) {
    for (const std::vector<float>& biases :
         std::vector<std::vector<float>>{{0.0f, kInf, 0.0f, kInf},
                                         {-kInf, -kInf, -kInf, -kInf},
                                         {kInf, -kInf, 3.0f, -kInf},
                                         {}}) {
      Row row;
      row.row.temperature = temperature;
      row.banned = {0};
      row.biases = biases;
      row.bias_ids = {0, 1, 2, 3};
      row.bias_ids.resize(biases.size());
      row.prompt = {0, 1, 0, 0};
      if (biases.empty()) row.row.repetition_penalty = 1e-38f;
      c.rows.push_back(row);
    }
  }
  ExpectSame(c);
}

// Returns a position for which the random generator gives a uniform number
// above `least`. A number near 1 draws one of the last ids, if logits are
// nearly equal and there is no filter.
uint64_t PositionNearOne(uint64_t seed, double least) {
  uint64_t position = 0;
  for (;; ++position) {
    const base::PhiloxCounter bits =
        base::Philox4x32(base::PhiloxKeyFromSeed(seed),
                         base::PhiloxCounterOf(position, /*sample_index=*/0));
    const uint64_t word = uint64_t{bits[1]} << 32 | bits[0];
    if (static_cast<double>(word) > least * 0x1p64) return position;
  }
}

// Makes rows with filters that keep many ids if all logits are nearly equal,
// and rows with filters that keep few.
std::vector<Row> RowsOfManyIds() {
  std::vector<Row> rows(10);
  for (uint64_t i = 0; i < rows.size(); ++i) {
    rows[i].row.seed = 7;
    rows[i].row.position = i;
  }
  rows[0].row.position = PositionNearOne(7, 0.9999);
  rows[1].row.top_k = 5000;
  rows[2].row.top_k = 50;
  rows[3].row.top_p = 0.5f;
  rows[3].row.position = rows[0].row.position;
  rows[4].row.top_p = 0.9999f;
  rows[5].row.min_p = 0.9f;
  rows[6].row.top_k = 15000, rows[6].row.top_p = 0.7f;
  rows[6].row.min_p = 0.88f;
  rows[7].row.top_k = 2048, rows[7].row.top_p = 0.99f;
  rows[8].row.top_p = 0.3f, rows[8].row.min_p = 0.5f;
  rows[9].row.temperature = 0.3f;
  return rows;
}

// Weights are at least 2^-12, so sums in float64 are exact in any order.
TEST(SampleCudaTest,
     RowsWithManyLikelyTokensGiveTheIdsOfTheCpuWithEveryFilter) {
  for (const int64_t vocab : {20000, 6003}) {
    Batch c = {RandomFloats(vocab, 11, 0.05f), RowsOfManyIds(), vocab, 3, true};
    c.rows[2].row.num_logprobs = 3;
    ExpectSame(c, 2);
    // Now the logits are far from 0 and from each other.
    for (float& logit : c.logits) logit = 40.0f * logit - 300.0f;
    ExpectSame(c, 3);
    // The logits have five distinct values, and thousands of ids share each
    // value.
    for (size_t i = 0; i < c.logits.size(); ++i) {
      c.logits[i] = static_cast<float>(i * i % 5) - 2.0f;
    }
    ExpectSame(c, 4);
  }
}

TEST(SampleCudaTest, RowsOf128KLikelyTokensGiveTheSameIdsAsTheCpu) {
  constexpr int64_t kVocab = 131072;
  Batch c = {RandomFloats(kVocab, 12, 0.02f), {}, kVocab, 2, true};
  c.rows.resize(3);
  c.rows[0].row.position = PositionNearOne(0, 0.99999);
  c.rows[1].row.top_p = 0.6f;
  c.rows[2].row.num_logprobs = 2;
  ExpectSame(c);
  c.logits.assign(kVocab, -1.5f);
  ExpectSame(c);
}

// The weights range from 1 to the smallest float above 0. Sums of more than
// 2048 weights may be rounded, but here no draw is so close to the border of an
// id that rounding would matter.
TEST(SampleCudaTest, LogitsWithLongTailsGiveTheSameIdsAsTheCpu) {
  constexpr int64_t kVocab = 20000;
  Batch c = {RandomFloats(kVocab, 13, 1.0f), RowsOfManyIds(), kVocab, 0, true};
  for (float& logit : c.logits) logit = -30.0f + 25.0f * logit;
  c.logits[77] = 1.0f;
  for (Row& row : c.rows) row.row.temperature *= 4.0f;
  c.rows[8].row.min_p = 1e-9f;
  c.rows[9].row.temperature = 1e-38f;
  ExpectSame(c);
  for (Row& row : c.rows) row.row.temperature = 1e30f;
  ExpectSame(c, 2);
}

// Returns a row for which the random generator returns its largest uniform
// number, 1 - 2^-53. The position and sample index were found by inverting
// Philox.
Row AtTheLargestNumber() {
  Row row;
  row.row.seed = 7;
  row.row.position = 876836801366396405;
  row.row.sample_index = 221342161;
  return row;
}
TEST(SampleCudaTest, TheSeedUsedByTheTestsGivesTheLargestUniformNumber) {
  const SampleRowArgs row = AtTheLargestNumber().row;
  const base::PhiloxCounter bits =
      base::Philox4x32(base::PhiloxKeyFromSeed(row.seed),
                       base::PhiloxCounterOf(row.position, row.sample_index));
  const uint64_t word = uint64_t{bits[1]} << 32 | bits[0];
  EXPECT_EQ(word >> 11, (uint64_t{1} << 53) - 1);
}

// Makes rows for which the random generator returns its largest number. If all
// logits are equal, most of these rows keep all or nearly all ids.
std::vector<Row> RowsAtTheLargestNumber(int64_t vocab) {
  std::vector<Row> rows(7, AtTheLargestNumber());
  rows[1].row.top_k = static_cast<int32_t>(std::max<int64_t>(vocab - 1, 1));
  rows[2].row.top_p = 0.99999994f;  // the largest float below 1
  rows[3].row.top_p = 0.7f;
  rows[4].row.min_p = 1.0f;
  rows[5].row.temperature = 0.3f;
  rows[5].row.top_k = static_cast<int32_t>((vocab + 1) / 2);
  rows[5].row.top_p = 0.99999994f;
  rows[6].row.temperature = 1e30f;
  return rows;
}
void ExpectIdsOfTheCpu(const Batch& c, uint64_t seed) {
  EmulatedTest test(seed);
  const std::vector<int32_t> ids = ByKernel(test, c).ids;
  EXPECT_EQ(ids, ByReference(c).ids);
  EXPECT_THAT(ids, ::testing::Each(::testing::AllOf(::testing::Ge(0),
                                                    ::testing::Lt(c.vocab))));
}

TEST(SampleCudaTest,
     ATokenIsDrawnFromEqualLogitsEvenForTheLargestUniformNumber) {
  uint64_t seed = 0;
  for (const int64_t vocab : {1, 3, 9, 513, 2047, 2049, 4097, 6003, 20001}) {
    for (const float logit : {0.0f, -1.7f, 3e38f}) {
      SCOPED_TRACE(vocab);
      ExpectIdsOfTheCpu({std::vector<float>(static_cast<size_t>(vocab), logit),
                         RowsAtTheLargestNumber(vocab), vocab, 0, true},
                        ++seed);
    }
  }
}

// A draw takes the first id at which the running sum of weights reaches a given
// number. Here one weight is 1 and the others are tiny. Due to rounding, the
// sum over all ids may stay below this number; an id must be drawn
// nevertheless.
TEST(SampleCudaTest, ATokenIsDrawnEvenIfRoundedSumsOfProbabilitiesAreTooSmall) {
  uint64_t seed = 0;
  for (const int64_t vocab : {2051, 5003, 9001, 20001}) {
    for (const float distance : {22.0f, 23.7f, 25.1f}) {
      SCOPED_TRACE(absl::StrCat(vocab, " ", distance));
      Batch c = {std::vector<float>(static_cast<size_t>(vocab), -distance),
                 RowsAtTheLargestNumber(vocab), vocab, 0, true};
      // One logit is much larger than the others, which are equal.
      c.logits[static_cast<size_t>(vocab / 3)] = 0.0f;
      ExpectIdsOfTheCpu(c, ++seed);
      // Now the other logits differ from each other.
      for (int64_t id = 0; id < vocab; ++id) {
        if (id != vocab / 3) {
          c.logits[static_cast<size_t>(id)] -=
              static_cast<float>(id * 7919 % vocab) / static_cast<float>(vocab);
        }
      }
      ExpectIdsOfTheCpu(c, ++seed);
    }
  }
}

// Due to the high temperature, nearly all weights are nearly equal. But the
// sort keys of the logits span 2^31 values.
TEST(SampleCudaTest, LogitsOfVeryDifferentSizesAreOrderedAsOnTheCpu) {
  constexpr int64_t kVocab = 5003;
  std::vector<float> logits(kVocab);
  for (size_t i = 0; i < logits.size(); ++i) {
    const float size = std::ldexp(1.0f, -static_cast<int>(i % 140));
    logits[i] = (i % 2 == 0 ? size : -size) * static_cast<float>(i % 7 + 1);
  }
  logits[4000] = 3e38f;
  Batch c = {logits, {Row(), AtTheLargestNumber(), Greedy()}, kVocab, 2600};
  c.shared = true;
  c.rows[0].row.temperature = 1e38f;
  c.rows[0].row.position = PositionNearOne(0, 0.5);
  c.rows[1].row.temperature = 1e38f;
  c.rows[1].row.top_k = 3001;
  c.rows[0].row.num_logprobs = 2600;
  c.rows[1].row.num_logprobs = 2100;
  c.rows[2].row.num_logprobs = 3;
  ExpectSame(c);
}

// The kernel searches by splitting an interval of keys repeatedly. After each
// split, this test continues in the part with the most keys (the worst case),
// or in a random part that may contain ids.
TEST(SampleCudaTest, TheSearchForTheTopIdsNeverNeedsMoreStepsThanItsLimit) {
  using emulated::TopKey;
  const TopKey end_of_row = emulated::BehindLogit(-kInf);
  std::mt19937 engine(3);
  int most = 0;
  for (const int32_t vocab : {3, 5003, 131072, 1 << 20}) {
    // An upper bound for the number of (logit, id) keys below `key`. No key has
    // the logit -0, because -0 counts as 0.
    const auto ids_before = [&](TopKey key) {
      key = std::min(key, end_of_row);
      constexpr TopKey kMinusZero = TopKey{0x80000000} << 32;
      if (key >= kMinusZero) key -= std::min(key - kMinusZero, TopKey{1} << 32);
      const uint64_t id =
          std::min<uint64_t>(key & 0xffffffffu, static_cast<uint32_t>(vocab));
      return static_cast<double>(key >> 32) * vocab + static_cast<double>(id);
    };
    for (int game = 0; game < 2000; ++game) {
      const float first[] = {3e38f, 1.0f, 1e-40f, 0.0f, -2.0f};
      TopKey begin = emulated::KeyOf(first[game % 5], 0);
      TopKey end = game % 2 == 0 ? end_of_row : emulated::kEndOfRow;
      int turn = 0;
      for (; ids_before(end) - ids_before(begin) > 1.0; ++turn) {
        ASSERT_LT(turn, emulated::kMostSplits);
        const emulated::TopCuts cuts =
            emulated::CutsBetween(begin, end, turn % 2 == 0, vocab);
        std::vector<std::pair<TopKey, TopKey>> parts;
        TopKey from = begin;
        for (const TopKey cut : cuts.key) {
          if (cut > from && ids_before(cut) > ids_before(from)) {
            parts.emplace_back(from, cut);
          }
          from = std::max(from, cut);
        }
        ASSERT_FALSE(parts.empty());
        ASSERT_EQ(from, end);
        auto chosen = std::max_element(
            parts.begin(), parts.end(), [](const auto& a, const auto& b) {
              return a.second - a.first < b.second - b.first;
            });
        if (game >= 5 && engine() % 4 == 0) {
          chosen =
              parts.begin() + static_cast<int64_t>(engine() % parts.size());
        }
        std::tie(begin, end) = *chosen;
      }
      most = std::max(most, turn);
    }
  }
  RecordProperty("most_splits", std::to_string(most));
  EXPECT_GT(most, 25);
}

// Arguments of a kernel in which one CTA collects the keys of all ids of a row
// in `keys`. This array holds at most `most` keys.
struct TakeArgs {
  const float* logits;
  int32_t vocab;
  uint32_t most;
  emulated::TopKey* keys;
  uint32_t* count;
};
KVASIR_KERNEL(emulated::kLogitThreads) TakeKernel(TakeArgs args) {
  namespace simt = emulated::simt;
  auto* const next = reinterpret_cast<uint32_t*>(simt::Shared());
  if (simt::Thread() == 0) *next = 0;
  simt::SyncCta();
  const emulated::TopOrder order = {args.logits, args.vocab, 0.0f, 1.0f, false};
  const uint32_t count = emulated::TakeSorted<1>(order, 0, emulated::kEndOfRow,
                                                 args.keys, args.most, next);
  if (simt::Thread() == 0) *args.count = count;
}
TEST(SampleCudaTest, SortKeysThatDoNotFitIntoTheArrayAreNotWrittenPastItsEnd) {
  constexpr uint32_t kMost = emulated::kSortedIds;
  constexpr uint64_t kUntouched = 0x1234567812345678;
  for (const uint32_t vocab : {100u, kMost, kMost + 1, 9000u}) {
    EmulatedTest test(vocab);
    (void)test.emulator();  // skips on a GPU, which lacks the kernel
    const DeviceBuffer logits = test.Put(std::vector<float>(vocab, 0.0f));
    const DeviceBuffer keys =
        test.Put(std::vector<uint64_t>(2 * kMost, kUntouched));
    const DeviceBuffer count = test.Put(std::vector<uint32_t>{0});
    KernelLaunch launch;
    launch.name = "take_sorted";
    launch.threads = emulated::kLogitThreads;
    launch.shared_bytes = 16;
    emulated::simt::Launch(
        test.launcher(), launch, TakeKernel,
        {logits.as<float>().device_address(), static_cast<int32_t>(vocab),
         kMost, keys.as<uint64_t>().device_address(),
         count.as<uint32_t>().device_address()});
    const uint32_t taken = std::min(vocab, kMost);
    EXPECT_EQ(test.Get<uint32_t>(count)[0], taken);
    const std::vector<uint64_t> got = test.Get<uint64_t>(keys);
    EXPECT_TRUE(std::is_sorted(got.begin(), got.begin() + taken));
    for (size_t i = 0; i < taken; ++i) {
      EXPECT_LT(emulated::IdOf(got[i]), static_cast<int32_t>(vocab));
    }
    EXPECT_EQ(std::vector<uint64_t>(got.begin() + taken, got.end()),
              std::vector<uint64_t>(2 * kMost - taken, kUntouched));
  }
}

// Returns how many bytes the kernel loads from the row. Checks that it loads
// whole sectors.
int64_t LoadedBytes(const Batch& c) {
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  (void)ByKernel(test, c);
  int64_t bytes = 0;
  for (const AccessCount& count : test.emulator().Accesses("sample")) {
    if (count.kind != "global load" || count.requests < 10) continue;
    EXPECT_EQ(count.sectors, count.least_sectors) << count.line;
    // Each lane loads 16 bytes.
    EXPECT_EQ(count.bytes, count.requests * 512) << count.line;
    bytes += count.bytes;
  }
  return bytes;
}

TEST(SampleCudaTest, GreedyRowsAreReadOnceAndOtherRowsAFewTimes) {
  constexpr int64_t kVocab = 16384;
  Batch c = {RandomFloats(kVocab, 14, 2.0f), {Greedy()}, kVocab, 3, true};
  EXPECT_EQ(LoadedBytes(c), 4 * kVocab);
  c.rows[0].row.num_logprobs = 0;
  EXPECT_EQ(LoadedBytes(c), 3 * 4 * kVocab);
  c.rows[0].row.num_logprobs = 3;
  EXPECT_EQ(LoadedBytes(c), 5 * 4 * kVocab);
  c.rows = {Row()};
  c.rows[0].row.top_k = 40, c.rows[0].row.top_p = 0.9f;
  EXPECT_EQ(LoadedBytes(c), 3 * 4 * kVocab);
  c.rows[0].row.min_p = 0.05f;
  EXPECT_EQ(LoadedBytes(c), 4 * 4 * kVocab);
  // Without filters, nearly equal logits are read up to six times, and equal
  // logits up to eight times.
  c.rows = {Row()};
  c.rows[0].row.position = PositionNearOne(0, 0.999);
  c.logits = RandomFloats(kVocab, 15, 0.05f);
  EXPECT_LE(LoadedBytes(c), 6 * 4 * kVocab);
  c.logits.assign(kVocab, 3.0f);
  EXPECT_LE(LoadedBytes(c), 8 * 4 * kVocab);
}

TEST(SampleCudaTest, AListOfTopTokensMayHoldTheWholeVocabulary) {
  Batch c = {RandomFloats(2 * 2500, 8, 20.0f), {Row(), Greedy()}, 2500, 2500};
  c.rows[0].row.num_logprobs = 2500;
  c.rows[1].row.num_logprobs = 700;
  ExpectSame(c);
}

TEST(SampleCudaTest, TheResultDoesNotDependOnTheOrderInWhichThreadsRun) {
  const Batch c = {RandomFloats(8 * 700, 9, 3.0f), AllKinds(700, 8), 700, 2};
  const Sampled want = ByReference(c);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    EXPECT_TRUE(want == ByKernel(test, c)) << seed;
  }
}

TEST(SampleCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  // Row 0 asks for the top tokens, and row 1 has a filter. The filter of row 2
  // keeps more ids than are sorted together. In row 3 all ids that are not
  // banned have equal logits.
  constexpr int32_t kVocab = 9000;
  Batch c = {RandomFloats(kVocab, 10, 2.0f), {}, kVocab, 5, true};
  c.rows.resize(4);
  for (uint64_t i = 0; i < 3; ++i) c.rows[i].row.position = i;
  c.rows[0].row.num_logprobs = 5;
  // Row 1 draws the last id that its filter keeps, so keeping one more id would
  // change the result.
  for (uint64_t i = 0; i < 3; ++i) c.rows[i].row.min_p = i < 2 ? 0.2f : 0.9f;
  c.rows[1].row.position = PositionNearOne(0, 0.999);
  c.rows[2].row.temperature = 20.0f;
  c.rows[2].row.top_p = 0.9f;
  c.rows[3].biases.assign(kVocab, -kInf);
  for (int32_t id = 0; id < kVocab; ++id) c.rows[3].bias_ids.push_back(id);
  // The first 300 ids are banned, so the first allowed id is in the block of
  // another warp.
  for (int32_t id = 0; id < 300; ++id) c.rows[3].banned.push_back(id);
  const Sampled want = ByReference(c);
  const auto mutants = LeaveOutEach("sample", kSeeds, [&](EmulatedTest& test) {
    return want == ByKernel(test, c);
  });
  EXPECT_EQ(mutants.size(), 13u);
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}

TEST(SampleCudaTest, AVocabularyAboveTheLimitOfTheGpuKernelsIsRefused) {
  EmulatedTest test;
  Workspace none(nullptr, 0);
  SampleParams params;
  params.vocab = kMostDeviceLogits + 1;
  EXPECT_THAT(
      Sample(test.stream(), params, none),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr("sample: a GPU supports a vocabulary of at most 1048576 "
                    "logits per row, not 1048577")));
  LogSoftmaxParams scored;
  scored.vocab_count = kMostDeviceLogits + 1;
  EXPECT_THAT(
      LogSoftmax(test.stream(), scored, none),
      base::StatusIs(absl::StatusCode::kUnimplemented,
                     HasSubstr("log_softmax: a GPU supports a vocabulary")));
}

// The count tables after one launch of count_tokens on three histories. The
// first clears its table before it counts, the second adds to its table, and
// the third is padding without a table.
struct Counted {
  std::vector<int32_t> cleared, kept;
};
Counted CountByKernel(EmulatedTest& test, const std::vector<int32_t>& ids) {
  const DeviceBuffer on_ids = test.Put(ids);
  const DeviceBuffer cleared = test.Put(std::vector<int32_t>(2000, 5));
  const DeviceBuffer kept = test.Put(std::vector<int32_t>(2000, 5));
  const auto count = static_cast<int64_t>(ids.size());
  const DeviceBuffer rows = test.Put(std::vector<TokenHistory>{
      {on_ids.as<int32_t>(), count, cleared.as<int32_t>(), true},
      {on_ids.as<int32_t>() + 3, count - 3, kept.as<int32_t>(), false},
      {}});
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(
      CountTokens(test.stream(), {rows.as<TokenHistory>(), 3, 2000}, none));
  return {test.Get<int32_t>(cleared), test.Get<int32_t>(kept)};
}

TEST(CountTokensCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  std::vector<int32_t> ids = {1, 3, 1, -1, 2000, 0};
  for (int32_t i = 0; i < 1500; ++i) ids.push_back(i * i % 1999);
  Counted want = {std::vector<int32_t>(2000, 0), std::vector<int32_t>(2000, 5)};
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= 2000) continue;
    ++want.cleared[static_cast<size_t>(ids[i])];
    if (i >= 3) ++want.kept[static_cast<size_t>(ids[i])];
  }
  const auto mutants =
      LeaveOutEach("count_tokens", kSeeds, [&](EmulatedTest& test) {
        const Counted got = CountByKernel(test, ids);
        return got.cleared == want.cleared && got.kept == want.kept;
      });
  ASSERT_EQ(mutants.size(), 1u);
  EXPECT_NE(mutants[0].verdict, Verdict::kRight);
}

}  // namespace
}  // namespace kvasir::kernels::emulation
