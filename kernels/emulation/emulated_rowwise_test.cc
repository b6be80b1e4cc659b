// Ops on rows: the kernels against op_ref, on seeds and odd shapes.
#include <gmock/gmock.h>

#include <vector>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels::emulation {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
constexpr uint64_t kSeeds = 8;

struct NormCase {
  NormKind kind;
  DType dtype;
  int64_t rows;
  int64_t columns;
  bool residual = true;
  bool out = true;
  bool in_place = false;
};

struct NormData {
  explicit NormData(const NormCase& c)
      : x(Rounded(RandomFloats(c.rows * c.columns, 1), c.dtype)),
        weight(RandomFloats(c.columns, 3)),
        bias(RandomFloats(c.columns, 4)) {
    if (c.residual) {
      residual = Rounded(RandomFloats(c.rows * c.columns, 2), c.dtype);
    }
  }
  std::vector<float> x, residual, weight, bias;
};

struct NormResult {
  std::vector<float> x, out;
};

NormResult NormByReference(const NormCase& c, NormData data) {
  NormResult result;
  result.out.resize(data.x.size());
  NormArgs args;
  args.x = data.x.data();
  args.residual = c.residual ? data.residual.data() : nullptr;
  args.weight = data.weight.data();
  args.bias = data.bias.data();
  args.out = c.out ? result.out.data() : nullptr;
  args.num_rows = c.rows;
  args.columns = c.columns;
  args.kind = c.kind;
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Norm(reference.stream(), OnDevice(args), reference.workspace()));
  result.x = data.x;
  return result;
}

NormResult NormByKernel(const NormCase& c, const NormData& data,
                        EmulatedTest& test) {
  const DeviceBuffer x = test.PutNumbers(data.x, c.dtype);
  const DeviceBuffer residual = test.PutNumbers(data.residual, c.dtype);
  const DeviceBuffer weight = test.Put(data.weight);
  const DeviceBuffer bias = test.Put(data.bias);
  const DeviceBuffer out =
      test.PutNumbers(std::vector<float>(data.x.size(), kPoison), c.dtype);
  NormParams params;
  params.x = x.as<float>();
  params.residual = residual.as<float>();
  params.weight = weight.as<float>();
  params.bias = bias.as<float>();
  params.out = c.in_place ? x.as<float>()
               : c.out    ? out.as<float>()
                          : DevicePtr<float>();
  params.num_rows = c.rows;
  params.columns = c.columns;
  params.kind = c.kind;
  params.dtype = c.dtype;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Norm(test.stream(), params, none));
  return {test.GetNumbers(x, c.dtype),
          c.out ? test.GetNumbers(c.in_place ? x : out, c.dtype)
                : std::vector<float>(data.x.size())};
}

void ExpectNorm(const NormCase& c, uint64_t seed) {
  SCOPED_TRACE(testing::Message()
               << c.rows << " rows of " << c.columns << " "
               << DTypeName(c.dtype) << ", kind " << static_cast<int>(c.kind)
               << ", seed " << seed);
  EmulatedTest test(seed);
  const NormData data(c);
  const NormResult want = NormByReference(c, data);
  const NormResult got = NormByKernel(c, data, test);
  EXPECT_LE(RelativeNorm(want.out, got.out), ToleranceOf(c.dtype));
  if (!c.in_place) {
    EXPECT_LE(RelativeNorm(want.x, got.x), ToleranceOf(c.dtype));
  }
}

TEST(NormCudaTest, IsTheReferencesWithinTheTypesTolerance) {
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    for (const DType dtype : kDTypes) {
      ExpectNorm({kind, dtype, 0, 5}, 1);
      ExpectNorm({kind, dtype, 1, 1, false}, 1);
      ExpectNorm({kind, dtype, 1, 64}, 2);
      ExpectNorm({kind, dtype, 3, 37}, 3);
      ExpectNorm({kind, dtype, 2, 4099, false}, 4);
      ExpectNorm({kind, dtype, 7, 4096}, 5);
      ExpectNorm({kind, dtype, 2, 72, true, false}, 6);
      ExpectNorm({kind, dtype, 2, 72, false, true, true}, 7);
    }
  }
}

TEST(NormCudaTest, IsTheSameBitsOnEverySeed) {
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    const NormCase c = {kind, DType::kBf16, 5, 600};
    const NormData data(c);
    EmulatedTest first(1);
    const NormResult want = NormByKernel(c, data, first);
    for (uint64_t seed = 2; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      const NormResult got = NormByKernel(c, data, test);
      EXPECT_TRUE(SameBits(want.out, got.out)) << seed;
      EXPECT_TRUE(SameBits(want.x, got.x)) << seed;
    }
  }
}

TEST(NormCudaTest, EachSiteIsMissed) {
  const NormCase c = {NormKind::kLayer, DType::kF32, 2, 600};
  const NormData data(c);
  const NormResult want = NormByReference(c, data);
  const auto mutants = LeaveOutEach("norm", kSeeds, [&](EmulatedTest& test) {
    return RelativeNorm(want.out, NormByKernel(c, data, test).out) <=
           ToleranceOf(c.dtype);
  });
  ASSERT_EQ(mutants.size(), 1u);  // CtaSum's barrier
  EXPECT_EQ(mutants[0].site.kind, "SyncCta");
  EXPECT_NE(mutants[0].verdict, Verdict::kRight);
}

TEST(NormCudaTest, RowsAreReadInWholeSectors) {
  const NormCase c = {NormKind::kRms, DType::kBf16, 2, 4096};
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  (void)NormByKernel(c, NormData(c), test);
  int64_t bytes = 0;
  for (const AccessCount& count : test.emulator().Accesses("norm")) {
    EXPECT_EQ(count.sectors, count.least_sectors)
        << count.kind << " at " << count.line;
    EXPECT_EQ(count.passes, count.least_passes)
        << count.kind << " at " << count.line;
    if (count.kind == "global store") bytes += count.bytes;
  }
  EXPECT_EQ(bytes, 2 * c.rows * c.columns * 2);  // x and out
}

std::vector<float> GateByKernel(EmulatedTest& test, DType dtype, int64_t rows,
                                int64_t features,
                                const std::vector<float>& gate_up) {
  const DeviceBuffer in = test.PutNumbers(gate_up, dtype);
  const DeviceBuffer out = test.PutNumbers(
      std::vector<float>(static_cast<size_t>(rows * features), kPoison), dtype);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(
      SiluMul(test.stream(),
              {in.as<float>(), out.as<float>(), rows, features, dtype}, none));
  return test.GetNumbers(out, dtype);
}

std::vector<float> GateByReference(int64_t rows, int64_t features,
                                   const std::vector<float>& gate_up) {
  std::vector<float> out(static_cast<size_t>(rows * features));
  const SiluMulArgs args = {gate_up.data(), out.data(), rows, features};
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      SiluMul(reference.stream(), OnDevice(args), reference.workspace()));
  return out;
}

TEST(SiluMulCudaTest, IsTheReferencesWithinTheTypesTolerance) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const auto& [rows, features] :
         std::vector<std::pair<int64_t, int64_t>>{
             {0, 3}, {1, 1}, {1, 256}, {5, 77}, {16, 1000}}) {
      const auto gate_up =
          Rounded(RandomFloats(rows * 2 * features, 1, 4.0f), dtype);
      EmulatedTest test(++seed);
      EXPECT_LE(
          RelativeNorm(GateByReference(rows, features, gate_up),
                       GateByKernel(test, dtype, rows, features, gate_up)),
          ToleranceOf(dtype))
          << rows << " rows of " << features << " " << DTypeName(dtype);
    }
  }
}

TEST(SiluMulCudaTest, FarGatesAreTheirLimits) {
  const std::vector<float> gate_up = {100.0f, -100.0f, 1e30f, -1e30f,
                                      2.0f,   2.0f,    2.0f,  2.0f};
  EmulatedTest test;
  const std::vector<float> out = GateByKernel(test, DType::kF32, 1, 4, gate_up);
  EXPECT_EQ(out[0], 200.0f);
  EXPECT_NEAR(out[1], 0.0f, 1e-30f);
  EXPECT_EQ(out[2], 2e30f);
  EXPECT_EQ(out[3], 0.0f);
}

struct EmbeddingCase {
  DType dtype;        // of activations
  DType table_dtype;  // and of positions
  std::vector<int32_t> ids;
  int64_t hidden;
  bool positions = false;
  bool tied = false;
};

std::vector<float> EmbedByKernel(EmulatedTest& test, const EmbeddingCase& c,
                                 const EmbeddingArgs& shape,
                                 const std::vector<float>& table,
                                 const std::vector<float>& places,
                                 const std::vector<int64_t>& positions) {
  const DeviceBuffer ids = test.Put(c.ids);
  const DeviceBuffer on_table = test.PutNumbers(table, c.table_dtype);
  const DeviceBuffer on_places = test.PutNumbers(places, c.table_dtype);
  const DeviceBuffer on_positions = test.Put(positions);
  const DeviceBuffer out = test.PutNumbers(
      std::vector<float>(c.ids.size() * static_cast<size_t>(c.hidden), kPoison),
      c.dtype);
  EmbeddingParams params;
  params.ids = ids.as<int32_t>();
  params.num_tokens = shape.num_tokens;
  params.vocab = shape.vocab;
  params.hidden = c.hidden;
  if (c.tied) {
    params.packed = {on_table.data(), c.hidden, shape.vocab, c.table_dtype,
                     WeightLayout::kRows};
  } else {
    params.table = on_table.data();
    params.table_dtype = c.table_dtype;
  }
  if (c.positions) {
    params.position_table = on_places.data();
    params.position_dtype = c.table_dtype;
    params.num_positions = shape.num_positions;
    params.positions = on_positions.as<int64_t>();
  }
  params.out = out.as<float>();
  params.dtype = c.dtype;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Embedding(test.stream(), params, none));
  return test.GetNumbers(out, c.dtype);
}

void ExpectEmbedding(const EmbeddingCase& c) {
  constexpr int64_t kVocab = 11;
  constexpr int64_t kPlaces = 6;
  const auto table = Rounded(RandomFloats(kVocab * c.hidden, 1), c.table_dtype);
  const auto places =
      Rounded(RandomFloats(kPlaces * c.hidden, 2), c.table_dtype);
  std::vector<int64_t> positions;
  for (size_t t = 0; t < c.ids.size(); ++t) {
    positions.push_back(static_cast<int64_t>(3 * t) - 1);  // some outside
  }
  std::vector<float> want(c.ids.size() * static_cast<size_t>(c.hidden));
  EmbeddingArgs args;
  args.ids = c.ids.data();
  args.num_tokens = static_cast<int64_t>(c.ids.size());
  args.vocab = kVocab;
  args.hidden = c.hidden;
  args.table = table.data();
  args.position_table = c.positions ? places.data() : nullptr;
  args.num_positions = kPlaces;
  args.positions = positions.data();
  args.out = want.data();
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Embedding(reference.stream(), OnDevice(args), reference.workspace()));
  EmulatedTest test;
  const auto got = EmbedByKernel(test, c, args, table, places, positions);
  // What is not summed is exact, but for the type that it is stored in.
  EXPECT_LE(RelativeNorm(Rounded(want, c.dtype), got),
            c.positions ? ToleranceOf(c.dtype) : 0.0)
      << DTypeName(c.dtype) << " of " << DTypeName(c.table_dtype);
}

TEST(EmbeddingCudaTest, IsTheReferencesRows) {
  for (const DType dtype : kDTypes) {
    for (const DType table : kDTypes) {
      ExpectEmbedding({dtype, table, {}, 8});
      ExpectEmbedding({dtype, table, {10}, 1});
      ExpectEmbedding({dtype, table, {3, -1, 11, 0, 3}, 300});
      ExpectEmbedding({dtype, table, {3, -1, 5}, 70, true});
      ExpectEmbedding({dtype, table, {2, 9}, 70, false, true});
    }
  }
}

TEST(EmbeddingCudaTest, ATableInPanelsIsRefused) {
  EmulatedTest test;
  EmbeddingParams params;
  params.vocab = 1;
  params.hidden = 1;
  params.packed.n = 1;
  params.packed.k = 1;
  Workspace none(nullptr, 0);
  EXPECT_THAT(
      Embedding(test.stream(), params, none),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     testing::HasSubstr("its layout is another device's")));
}

// q of heads that are alike, k of heads with lists of their own.
struct RopeCase {
  DType dtype;
  RopePairing pairing;
  int64_t tokens;
  int64_t q_heads;
  int64_t head_dim;
  int64_t rotary_dim;
};

struct RopeData {
  explicit RopeData(const RopeCase& c) {
    k_heads = {{0, 5, pairs}, {11, c.rotary_dim / 2, nullptr}, {3, 0, nullptr}};
    q_stride = c.q_heads * c.head_dim + 3;
    k_stride = 11 + c.rotary_dim + 1;
    q = Rounded(RandomFloats(c.tokens * q_stride, 1), c.dtype);
    k = Rounded(RandomFloats(c.tokens * k_stride, 2), c.dtype);
    for (int64_t t = 0; t < c.tokens; ++t)
      positions.push_back(t * t * 1000 + t);
    for (int64_t f = 0; f < c.rotary_dim / 2; ++f) {
      steps.push_back(RopeStep(1.0 / (1.0 + static_cast<double>(f))));
    }
    shape.q = {nullptr, q_stride, c.q_heads, c.head_dim};
    shape.k = {nullptr, k_stride, 0, 0};
    shape.rotary_dim = c.rotary_dim;
    shape.pairing = c.pairing;
    shape.attention_factor = 1.25f;
  }

  const int32_t pairs[5] = {3, 0, 0, 2, 1};
  std::vector<RopeHead> k_heads;
  int64_t q_stride, k_stride;
  std::vector<float> q, k;
  std::vector<int64_t> positions;
  std::vector<uint64_t> steps;
  RopeParams shape;
};

RopeData RopeByReference(const RopeCase& c) {
  RopeData data(c);
  TestStream reference(1, CpuBackend::kReference);
  auto rope =
      Prepare(reference.device(), data.shape, {{}, data.k_heads, data.steps});
  KVASIR_EXPECT_OK(rope.status());
  KVASIR_EXPECT_OK(
      Rope(reference.stream(), *rope,
           {OnDevice(data.q.data()), OnDevice(data.k.data()),
            OnDevice<const int64_t>(data.positions.data()), c.tokens},
           reference.workspace()));
  return data;
}

RopeData RopeByKernel(EmulatedTest& test, const RopeCase& c) {
  RopeData data(c);
  data.shape.dtype = c.dtype;
  const DeviceBuffer q = test.PutNumbers(data.q, c.dtype);
  const DeviceBuffer k = test.PutNumbers(data.k, c.dtype);
  const DeviceBuffer positions = test.Put(data.positions);
  const DeviceBuffer scratch =
      test.Memory(static_cast<size_t>(RopeScratch(c.rotary_dim)) * 4 + 64);
  Workspace workspace(scratch.data(), scratch.bytes());
  auto rope =
      Prepare(test.device(), data.shape, {{}, data.k_heads, data.steps});
  KVASIR_EXPECT_OK(rope.status());
  KVASIR_EXPECT_OK(
      Rope(test.stream(), *rope,
           {q.as<float>(), k.as<float>(), positions.as<int64_t>(), c.tokens},
           workspace));
  data.q = test.GetNumbers(q, c.dtype);
  data.k = test.GetNumbers(k, c.dtype);
  return data;
}

TEST(RopeCudaTest, IsTheReferencesWithinTheTypesTolerance) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const RopePairing pairing :
         {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
      for (const RopeCase& c :
           std::vector<RopeCase>{{dtype, pairing, 0, 1, 8, 8},
                                 {dtype, pairing, 1, 1, 8, 8},
                                 {dtype, pairing, 3, 9, 80, 70},
                                 {dtype, pairing, 5, 4, 128, 128}}) {
        const RopeData want = RopeByReference(c);
        EmulatedTest test(++seed);
        const RopeData got = RopeByKernel(test, c);
        EXPECT_LE(RelativeNorm(want.q, got.q), ToleranceOf(dtype)) << seed;
        EXPECT_LE(RelativeNorm(want.k, got.k), ToleranceOf(dtype)) << seed;
      }
    }
  }
}

TEST(RopeCudaTest, EachSiteIsMissed) {
  const RopeCase c = {DType::kF32, RopePairing::kHalfSplit, 2, 4, 64, 64};
  const RopeData want = RopeByReference(c);
  const auto mutants = LeaveOutEach("rope", kSeeds, [&](EmulatedTest& test) {
    return RelativeNorm(want.q, RopeByKernel(test, c).q) <=
           ToleranceOf(c.dtype);
  });
  ASSERT_EQ(mutants.size(), 1u);
  EXPECT_EQ(mutants[0].site.kind, "SyncCta");
  EXPECT_NE(mutants[0].verdict, Verdict::kRight);
}

}  // namespace
}  // namespace kvasir::kernels::emulation
