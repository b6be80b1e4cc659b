// Tests the kernels that rotate, lift and copy latents: their results must
// equal those of the reference implementation bit by bit.
#include <gmock/gmock.h>

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/hadamard.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/latents/ops.h"
#include "kernels/linear/pack.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();

// ---- hadamard

struct HadamardCase {
  std::vector<HadamardPlace> places;
  int64_t stride;
  DType dtype = DType::kF32;
  bool transposed = false;
  bool in_place = false;
  int64_t num_rows = 3;
};

HadamardParams ShapeOf(const HadamardCase& c) {
  HadamardParams shape;
  shape.x_row_stride = c.stride;
  shape.y_row_stride = c.stride;
  shape.transposed = c.transposed;
  return shape;
}

std::vector<float> HadamardByReference(const HadamardCase& c,
                                       std::vector<float> x) {
  x = Rounded(std::move(x), c.dtype);
  std::vector<float> y = x;
  if (!c.in_place) y.assign(x.size(), kPoison);
  TestStream test(1, CpuBackend::kReference);
  HadamardTables tables(&test.device());
  const auto prepared = Prepare(test.device(), ShapeOf(c), c.places, &tables);
  KVASIR_EXPECT_OK(prepared.status());
  KVASIR_EXPECT_OK(Hadamard(
      test.stream(), *prepared,
      {OnDevice(x.data()), OnDevice(y.data()), c.num_rows}, test.workspace()));
  return Rounded(std::move(y), c.dtype);
}

std::vector<float> HadamardByKernel(EmulatedTest& test, const HadamardCase& c,
                                    const std::vector<float>& x) {
  const DeviceBuffer from = test.PutNumbers(x, c.dtype);
  const DeviceBuffer to =
      test.PutNumbers(std::vector<float>(x.size(), kPoison), c.dtype);
  HadamardTables tables(&test.device());
  HadamardParams shape = ShapeOf(c);
  shape.dtype = c.dtype;
  const auto prepared = Prepare(test.device(), shape, c.places, &tables);
  KVASIR_EXPECT_OK(prepared.status());
  const DeviceBuffer& result = c.in_place ? from : to;
  const HadamardRows rows = {from.as<float>(), result.as<float>(), c.num_rows};
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Hadamard(test.stream(), *prepared, rows, none));
  return test.GetNumbers(result, c.dtype);
}

// Compares numbers; NaNs are equal to each other, because memory that no op
// writes is filled with NaN.
bool SameNumbers(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) ? !std::isnan(b[i]) : BitsOf(a[i]) != BitsOf(b[i])) {
      return false;
    }
  }
  return true;
}

// Covers powers of two, multiples of the orders of Paley I and Paley II
// matrices, widths that need several blocks, and blocks that need a whole CTA.
TEST(HadamardCudaTest, GivesTheSameBitsAsTheReference) {
  uint64_t seed = 0;
  for (const int64_t width :
       {1, 2, 7, 24, 50, 72, 128, 300, 512, 1024, 1152, 2080}) {
    for (const DType dtype : kDTypes) {
      for (const bool transposed : {false, true}) {
        // The emulator is slow, so larger cases run in one type only.
        const bool small = width <= 300 && !transposed;
        if (!small && dtype != DType::kF32) continue;
        HadamardCase c = {{{width, 1}, {24, width + 3}},
                          width + 30,
                          dtype,
                          transposed,
                          seed % 3 == 0,
                          1 + static_cast<int64_t>(seed % 2) * 10};
        if (width > 300) c.num_rows = 1;
        const std::vector<float> x =
            RandomFloats(c.num_rows * c.stride, static_cast<uint32_t>(width));
        EmulatedTest test(++seed);
        EXPECT_TRUE(SameNumbers(HadamardByReference(c, x),
                                HadamardByKernel(test, c, x)))
            << width << " " << DTypeName(dtype) << " seed " << seed;
      }
    }
  }
}

TEST(HadamardCudaTest, NothingIsWrittenIfThereAreNoRowsOrNoLatents) {
  const std::vector<float> x = RandomFloats(64, 1);
  for (HadamardCase c :
       {HadamardCase{{{32, 0}}, 32, DType::kF32, false, true, 0},
        HadamardCase{{}, 32, DType::kF32, false, true, 2}}) {
    EmulatedTest test;
    EXPECT_TRUE(SameBits(HadamardByKernel(test, c, x), x));
  }
}

TEST(HadamardCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  // Both widths have several blocks. The kernel computes a block of width 50 in
  // one warp, and one of width 1300 in a whole CTA.
  const HadamardCase warp = {{{50, 0}}, 50};
  const HadamardCase cta = {{{1300, 0}}, 1300, DType::kF32, false, false, 1};
  ASSERT_GT(base::HadamardBlocks(50).size(), 1u);
  ASSERT_GT(base::HadamardBlocks(1300).size(), 1u);
  for (const HadamardCase& c : {warp, cta}) {
    const std::vector<float> x = RandomFloats(c.num_rows * c.stride, 2);
    const std::vector<float> want = HadamardByReference(c, x);
    const auto mutants =
        LeaveOutEach("hadamard", kSeeds, [&](EmulatedTest& test) {
          return SameNumbers(want, HadamardByKernel(test, c, x));
        });
    EXPECT_EQ(mutants.size(), 3u);
    for (const Mutant& mutant : mutants) {
      EXPECT_NE(mutant.verdict, Verdict::kRight)
          << mutant.site.kind << " at " << mutant.site.file << ":"
          << mutant.site.line;
    }
  }
}

TEST(HadamardCudaTest, AHadamardBlockThatDoesNotFitInSharedMemoryIsRefused) {
  EmulatedTest test;
  HadamardTables tables(&test.device());
  HadamardParams shape;
  shape.x_row_stride = shape.y_row_stride = 1 << 20;
  KVASIR_EXPECT_OK(Prepare(test.device(), shape,
                           std::vector<HadamardPlace>{{8192, 0}}, &tables)
                       .status());
  EXPECT_THAT(
      Prepare(test.device(), shape, std::vector<HadamardPlace>{{16384, 0}},
              &tables)
          .status(),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr("hadamard: a block of 16384 numbers is too large for the "
                    "GPU kernel, which supports at most 12288")));
}

// ---- key_bias

TEST(KeyBiasCudaTest, GivesTheSameBitsAsTheReference) {
  struct Shape {
    int64_t heads, kv_heads, dim, tile, exact;
  };
  uint64_t seed = 0;
  for (const Shape& shape : {Shape{6, 2, 64, 18, 4}, Shape{1, 1, 8, 2, 1},
                             Shape{9, 3, 128, 40, 0}, Shape{4, 4, 256, 0, 8}}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t tokens : {0, 1, 5}) {
        const int64_t columns = KeyBiasColumns(shape.tile, shape.exact);
        std::vector<int64_t> query_column, key_column, out_column;
        int64_t next = 1;
        const auto place = [&](int64_t heads, int64_t width,
                               std::vector<int64_t>* places) {
          for (int64_t h = 0; h < heads; ++h, next += width + 1) {
            places->push_back(next);
          }
        };
        place(shape.heads, shape.dim, &query_column);
        place(shape.kv_heads, shape.dim, &key_column);
        place(shape.heads, columns, &out_column);
        std::vector<KeyBiasPair> pairs;
        const std::vector<float> biases = RandomFloats(
            shape.kv_heads * (shape.tile + shape.exact) * 2, 7, 9.0f);
        for (size_t i = 0; i < biases.size() / 2; ++i) {
          const auto p = static_cast<int32_t>(i) %
                         static_cast<int32_t>(shape.tile + shape.exact);
          pairs.push_back({p, p + static_cast<int32_t>(shape.dim / 2),
                           biases[2 * i], biases[2 * i + 1],
                           RopeStep(0.003 / static_cast<double>(i + 1))});
        }
        std::vector<int64_t> positions;
        for (int64_t t = 0; t < tokens; ++t) positions.push_back(t * 5077 + 31);
        KeyBiasParams params;
        params.row_stride = next;
        params.num_heads = shape.heads;
        params.num_kv_heads = shape.kv_heads;
        params.tile_pairs = shape.tile;
        params.exact_pairs = shape.exact;
        params.unit = std::ldexp(1.0f, static_cast<int>(seed % 3) * 4);
        const KeyBiasTables tables = {key_column, query_column, out_column,
                                      pairs};
        std::vector<float> rows =
            Rounded(RandomFloats(tokens * next, 8), dtype);
        EmulatedTest test(++seed);
        const DeviceBuffer on_device = test.PutNumbers(rows, dtype);
        const DeviceBuffer at = test.Put(positions);
        TestStream reference(1, CpuBackend::kReference);
        const auto host = Prepare(reference.device(), params, tables);
        KVASIR_ASSERT_OK(host.status());
        KVASIR_EXPECT_OK(
            KeyBias(reference.stream(), *host,
                    {OnDevice(rows.data()),
                     OnDevice<const int64_t>(positions.data()), tokens},
                    reference.workspace()));
        params.dtype = dtype;
        const auto prepared = Prepare(test.device(), params, tables);
        KVASIR_ASSERT_OK(prepared.status());
        Workspace none(nullptr, 0);
        KVASIR_EXPECT_OK(
            KeyBias(test.stream(), *prepared,
                    {on_device.as<float>(), at.as<int64_t>(), tokens}, none));
        EXPECT_TRUE(SameNumbers(Rounded(rows, dtype),
                                test.GetNumbers(on_device, dtype)))
            << DTypeName(dtype) << " seed " << seed;
      }
    }
  }
}

// ---- lift

struct LiftCase {
  int64_t rows;
  int64_t queries;  // query heads per KV head
  DType matrix;
  // widths of the input and output of each KV head's matrix
  std::vector<std::pair<int64_t, int64_t>> in_out;
  DType dtype = DType::kF32;
  int64_t first_row = 0;
  int64_t gap = 1;  // numbers between the heads in a row of x
};

// Random inputs of a case, and the columns where heads begin.
struct LiftData {
  explicit LiftData(const LiftCase& c) {
    for (const auto& [in, out] : c.in_out) {
      // The matrix is stored transposed, as [out, in].
      matrices.push_back(Rounded(
          RandomFloats(in * out, static_cast<uint32_t>(matrices.size())),
          c.matrix));
      for (int64_t i = 0; i < c.queries; ++i) {
        columns_in.push_back(x_stride);
        x_stride += in + c.gap;
        columns_out.push_back(y_stride + 2);
        y_stride += out + 2;
      }
    }
    x = Rounded(RandomFloats(c.rows * x_stride, 50), c.dtype);
    y.assign(static_cast<size_t>(c.rows * y_stride), 7.0f);
  }
  std::vector<std::vector<float>> matrices;
  std::vector<int64_t> columns_in, columns_out;
  int64_t x_stride = 0, y_stride = 0;
  std::vector<float> x, y;
};

PackedMatrix MatrixOf(const LiftCase& c, size_t head) {
  PackedMatrix matrix;
  std::tie(matrix.k, matrix.n) = c.in_out[head];
  matrix.dtype = c.matrix;
  return matrix;
}

std::vector<float> LiftByReference(const LiftCase& c) {
  LiftData data(c);
  TestStream test(1, CpuBackend::kReference);
  std::vector<std::unique_ptr<StoredArray>> memory;
  std::vector<PackedMatrix> matrices;
  for (size_t j = 0; j < c.in_out.size(); ++j) {
    PackedMatrix& matrix = matrices.emplace_back(MatrixOf(c, j));
    StoredArray stored(data.matrices[j], c.matrix);
    memory.push_back(std::make_unique<StoredArray>(
        std::vector<float>(
            static_cast<size_t>(matrix.bytes() / DTypeBytes(c.matrix))),
        c.matrix));
    matrix.data = OnDevice(memory.back()->data());
    KVASIR_EXPECT_OK(PackRows(matrix, {stored.data(), matrix.n, matrix.k}, 0,
                              memory.back()->data()));
  }
  LiftParams shape;
  shape.x_row_stride = data.x_stride;
  shape.y_row_stride = data.y_stride;
  const auto lift = Prepare(test.device(), shape, matrices,
                            {data.columns_in, data.columns_out});
  KVASIR_EXPECT_OK(lift.status());
  KVASIR_EXPECT_OK(Lift(test.stream(), *lift,
                        {OnDevice(data.x.data()), OnDevice(data.y.data()),
                         c.first_row, c.rows - c.first_row},
                        test.workspace()));
  return Rounded(data.y, c.dtype);
}

std::vector<float> LiftByKernel(EmulatedTest& test, const LiftCase& c) {
  const LiftData data(c);
  std::vector<DeviceBuffer> memory;
  std::vector<PackedMatrix> matrices;
  for (size_t j = 0; j < c.in_out.size(); ++j) {
    PackedMatrix& matrix = matrices.emplace_back(MatrixOf(c, j));
    memory.push_back(test.PutNumbers(data.matrices[j], c.matrix));
    matrix.data = memory.back().data();
    matrix.layout = WeightLayout::kRows;
  }
  const DeviceBuffer x = test.PutNumbers(data.x, c.dtype);
  const DeviceBuffer y = test.PutNumbers(data.y, c.dtype);
  LiftParams shape;
  shape.x_row_stride = data.x_stride;
  shape.y_row_stride = data.y_stride;
  shape.dtype = c.dtype;
  const auto lift = Prepare(test.device(), shape, matrices,
                            {data.columns_in, data.columns_out});
  KVASIR_EXPECT_OK(lift.status());
  const LiftRows rows = {x.as<float>(), y.as<float>(), c.first_row,
                         c.rows - c.first_row};
  Workspace counter = Workspace::Counting();
  KVASIR_EXPECT_OK(Lift(test.stream(), *lift, rows, counter));
  const DeviceBuffer scratch = test.Memory(counter.peak_bytes());
  Workspace workspace = EmulatedTest::WorkspaceOf(scratch);
  KVASIR_EXPECT_OK(Lift(test.stream(), *lift, rows, workspace));
  return test.GetNumbers(y, c.dtype);
}

TEST(LiftCudaTest, GivesTheSameBitsAsTheReference) {
  uint64_t seed = 0;
  const DType f32 = DType::kF32, f16 = DType::kF16, bf16 = DType::kBf16;
  for (const LiftCase& c :
       std::vector<LiftCase>{{1, 1, f32, {{16, 24}}},
                             {0, 1, f32, {{16, 24}}},
                             {16, 1, f32, {{32, 128}}},
                             {1, 4, bf16, {{64, 160}, {64, 24}}, f16},
                             {7, 3, f16, {{33, 8}, {33, 96}, {33, 41}}, bf16},
                             {19, 2, bf16, {{64, 300}, {1, 64}}},
                             {18, 1, bf16, {{35, 130}, {64, 128}}, f32, 1},
                             {5, 2, f32, {{600, 40}, {3, 1}}, bf16, 4}}) {
    EmulatedTest test(++seed);
    EXPECT_TRUE(SameBits(LiftByReference(c), LiftByKernel(test, c)))
        << "case " << seed;
  }
}

// Returns the name of the kernel that ran.
std::string KernelOf(EmulatedTest& test) {
  for (const char* name : {"lift", "lift_few_rows", "lift_many_rows"}) {
    if (!test.emulator().SyncSites(name).empty()) return name;
  }
  return "none";
}

// Covers matrices of different sizes that do not fill whole tiles or chunks,
// and heads that begin at any column.
TEST(LiftCudaTest,
     TensorCoresMatchTheReferenceIfInputsWeightsAndOutputsHaveOneType) {
  uint64_t seed = 0;
  const DType f16 = DType::kF16, bf16 = DType::kBf16;
  for (const auto& [c, kernel] : std::vector<std::pair<LiftCase, const char*>>{
           {{1, 4, bf16, {{64, 160}, {64, 24}}, bf16}, "lift_few_rows"},
           {{7, 3, f16, {{33, 8}, {33, 96}, {33, 41}}, f16}, "lift_few_rows"},
           {{3, 1, bf16, {{1, 1}, {16, 3}}, bf16}, "lift_few_rows"},
           {{5, 2, f16, {{600, 40}, {3, 1}}, f16, 4}, "lift_few_rows"},
           {{130, 1, bf16, {{135, 67}, {8, 130}}, bf16, 1}, "lift_many_rows"},
           {{33, 4, f16, {{40, 72}, {72, 40}}, f16}, "lift_many_rows"},
           {{0, 1, bf16, {{16, 24}}, bf16}, "none"}}) {
    EmulatedTest test(++seed);
    const std::vector<float> want = LiftByReference(c);
    EXPECT_LE(RelativeNorm(want, LiftByKernel(test, c)), ToleranceOf(c.dtype))
        << "case " << seed;
    if (OnGpu()) continue;
    EXPECT_EQ(KernelOf(test), kernel) << "case " << seed;
  }
}

// A row's result has the same bits in both tensor-core kernels and whatever the
// other rows are.
TEST(LiftCudaTest, TheBitsOfARowDoNotDependOnOtherRows) {
  LiftCase c = {40, 4, DType::kBf16, {{72, 70}, {48, 24}}, DType::kBf16};
  EmulatedTest one(1, /*multiprocessors=*/1);
  const std::vector<float> all = LiftByKernel(one, c);
  EmulatedTest many(2, /*multiprocessors=*/100);
  EXPECT_TRUE(SameBits(all, LiftByKernel(many, c)));
  if (!OnGpu()) {
    EXPECT_EQ(KernelOf(one), "lift_many_rows");
    EXPECT_EQ(KernelOf(many), "lift_few_rows");
  }
  const auto stride = static_cast<int64_t>(all.size()) / c.rows;
  c.first_row = 39;
  EmulatedTest last(3);
  const std::vector<float> alone = LiftByKernel(last, c);
  EXPECT_TRUE(SameBits({all.end() - stride, all.end()},
                       {alone.end() - stride, alone.end()}));
}

TEST(LiftCudaTest, TensorCoresReadWithoutBankConflicts) {
  LiftCase c = {32, 4, DType::kBf16, {{128, 64}}, DType::kBf16};
  c.gap = 8;
  for (const int multiprocessors : {1, 100}) {
    EmulatedTest test(1, multiprocessors, /*count_accesses=*/true);
    LiftByKernel(test, c);
    for (const AccessCount& count : test.emulator().Accesses(KernelOf(test))) {
      if (count.kind.find("shared") == std::string::npos) continue;
      EXPECT_EQ(count.passes, count.least_passes)
          << count.kind << " at " << count.line;
    }
  }
}

// Returns a case for the named kernel. All its tiles are full, it fills each
// stage of the copy pipeline more than once, and it copies 16 bytes at a time.
LiftCase InStages(const std::string& kernel) {
  LiftCase c = {2, 2, DType::kF16, {{648, 40}}, DType::kF16};
  if (kernel == "lift_many_rows") {
    c = {64, 2, DType::kBf16, {{200, 130}, {64, 72}}, DType::kBf16};
  }
  c.gap = 8;
  return c;
}

TEST(LiftCudaTest,
     LeavingOutAnySynchronizingLineOfTheTensorCoreKernelsIsDetected) {
  for (const std::string kernel : {"lift_few_rows", "lift_many_rows"}) {
    const LiftCase c = InStages(kernel);
    EmulatedTest whole(1);
    const std::vector<float> want = LiftByKernel(whole, c);
    EXPECT_EQ(KernelOf(whole), kernel);
    const auto mutants = LeaveOutEach(kernel, kSeeds, [&](EmulatedTest& test) {
      return SameBits(want, LiftByKernel(test, c));
    });
    // the sites are two commits, a wait and a barrier
    EXPECT_EQ(mutants.size(), 4u);
    for (const Mutant& mutant : mutants) {
      EXPECT_NE(mutant.verdict, Verdict::kRight)
          << kernel << ": " << mutant.site.kind << " at " << mutant.site.line;
    }
  }
}

TEST(LiftCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  const LiftCase c = {17, 1, DType::kF32, {{70, 140}}};
  const std::vector<float> want = LiftByReference(c);
  const auto mutants = LeaveOutEach("lift", kSeeds, [&](EmulatedTest& test) {
    return SameBits(want, LiftByKernel(test, c));
  });
  EXPECT_EQ(mutants.size(), 2u);
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}

TEST(LiftCudaTest, ALiftMatrixInTheWeightLayoutOfTheCpuIsRefused) {
  EmulatedTest test;
  LiftParams shape;
  shape.x_row_stride = shape.y_row_stride = 64;
  const std::vector<int64_t> column = {0};
  PackedMatrix matrix;
  matrix.k = matrix.n = 8;
  EXPECT_THAT(
      Prepare(test.device(), shape, {matrix}, {column, column}).status(),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("lift: the matrix of KV head 0 has "
                               "the weight layout of another kind of device")));
}

TEST(ComplexLiftCudaTest, GivesTheSameBitsAsTheReference) {
  constexpr int64_t kPairs = 32;
  constexpr int64_t kRows = 4;
  uint64_t seed = 0;
  // The number of complex channels of each KV head. A KV head has two query
  // heads.
  const std::vector<int64_t> counts = {37, 70};
  std::vector<std::vector<int32_t>> pairs(2);
  std::vector<int64_t> columns_in, columns_out;
  int64_t y_stride = 0;
  for (size_t j = 0; j < 2; ++j) {
    for (int64_t c = 0; c < counts[j]; ++c) {
      pairs[j].push_back(static_cast<int32_t>(c * kPairs / counts[j]));
    }
    for (int i = 0; i < 2; ++i) {
      columns_in.push_back(static_cast<int64_t>(columns_in.size()) *
                           (2 * kPairs + 1));
      columns_out.push_back(y_stride + 1);
      y_stride += 2 * counts[j] + 1;
    }
  }
  const int64_t x_stride = columns_in.back() + 2 * kPairs;
  for (const DType dtype : kDTypes) {
    for (const RopePairing in :
         {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
      for (const RopePairing out :
           {RopePairing::kHalfSplit, RopePairing::kInterleaved}) {
        for (const bool selects_only : {false, true}) {
          const std::vector<float> x =
              Rounded(RandomFloats(kRows * x_stride, 8), dtype);
          const std::vector<float> untouched(
              static_cast<size_t>(kRows * y_stride), 7.0f);
          std::vector<std::vector<float>> ups;
          for (const int64_t count : counts) {
            ups.push_back(RandomFloats(2 * count, 3));
          }
          ComplexLiftParams shape;
          shape.x_row_stride = x_stride;
          shape.y_row_stride = y_stride;
          shape.num_pairs = kPairs;
          shape.pairing = in;
          shape.out_pairing = out;
          Workspace none(nullptr, 0);

          std::vector<float> want = untouched;
          TestStream cpu(1, CpuBackend::kReference);
          std::vector<ComplexChannels> channels(2);
          for (size_t j = 0; j < 2; ++j) {
            channels[j] = {counts[j], pairs[j].data(),
                           OnDevice(selects_only ? nullptr : ups[j].data())};
          }
          const auto on_cpu =
              Prepare(cpu.device(), shape, channels, {columns_in, columns_out});
          KVASIR_ASSERT_OK(on_cpu.status());
          // Skips the first row.
          KVASIR_EXPECT_OK(ComplexLift(
              cpu.stream(), *on_cpu,
              {OnDevice(x.data()), OnDevice(want.data()), 1, kRows - 1}, none));

          EmulatedTest test(++seed);
          const DeviceBuffer up0 = test.Put(ups[0]);
          const DeviceBuffer up1 = test.Put(ups[1]);
          if (!selects_only) {
            channels[0].up = up0.as<float>();
            channels[1].up = up1.as<float>();
          }
          const DeviceBuffer from = test.PutNumbers(x, dtype);
          const DeviceBuffer to = test.PutNumbers(untouched, dtype);
          shape.dtype = dtype;
          const auto prepared = Prepare(test.device(), shape, channels,
                                        {columns_in, columns_out});
          KVASIR_ASSERT_OK(prepared.status());
          KVASIR_EXPECT_OK(ComplexLift(
              test.stream(), *prepared,
              {from.as<float>(), to.as<float>(), 1, kRows - 1}, none));
          EXPECT_TRUE(
              SameBits(Rounded(want, dtype), test.GetNumbers(to, dtype)))
              << "seed " << seed;
        }
      }
    }
  }
}

// ---- copy_pages

std::vector<char> RandomBytes(int64_t count, uint32_t seed) {
  std::vector<char> bytes;
  for (const float number : RandomFloats(count, seed, 100.0f)) {
    bytes.push_back(static_cast<char>(static_cast<int>(number)));
  }
  return bytes;
}

std::vector<char> CopiedPages(std::vector<char> from,
                              const std::vector<char>* to, int64_t page_bytes,
                              const std::vector<PagePair>& pairs) {
  std::vector<char> result = to != nullptr ? *to : from;
  CopyPagesArgs args;
  args.from = to != nullptr ? from.data() : result.data();
  args.to = result.data();
  args.page_bytes = page_bytes;
  args.pairs = pairs.data();
  args.num_pairs = static_cast<int64_t>(pairs.size());
  TestStream test;
  KVASIR_EXPECT_OK(CopyPages(test.stream(), OnDevice(args), test.workspace()));
  return result;
}

// Covers copies in units of 16, 4 and 1 bytes, within one arena and between
// two, with padding pairs. Pages are smaller and larger than what a CTA copies
// at a time.
TEST(CopyPagesCudaTest, CopiesWholePagesAndWritesNothingElse) {
  constexpr int32_t kFar = 1 << 30;
  const std::vector<PagePair> pairs = {{0, 3}, {-1, kFar}, {4, 1}, {-kFar, 0}};
  uint64_t seed = 0;
  for (const int64_t page_bytes : {1, 16, 20, 21, 4096, 4100, 20000}) {
    const std::vector<char> from = RandomBytes(5 * page_bytes, 1);
    const std::vector<char> to = RandomBytes(4 * page_bytes, 2);
    for (const bool within : {true, false}) {
      EmulatedTest test(++seed);
      const DeviceBuffer source = test.Put(from);
      const DeviceBuffer target = test.Put(to);
      const DeviceBuffer list = test.Put(pairs);
      const DeviceBuffer& result = within ? source : target;
      CopyPagesParams params;
      params.from = source.data();
      params.to = result.data();
      params.page_bytes = page_bytes;
      params.pairs = list.as<PagePair>();
      params.num_pairs = static_cast<int64_t>(pairs.size());
      Workspace none(nullptr, 0);
      KVASIR_EXPECT_OK(CopyPages(test.stream(), params, none));
      EXPECT_TRUE(test.Get<char>(result) ==
                  CopiedPages(from, within ? nullptr : &to, page_bytes, pairs))
          << page_bytes << (within ? " within" : " to another");
    }
  }
}

TEST(CopyPagesCudaTest, PagesOfACacheAreCopiedInWholeSectors) {
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  const DeviceBuffer arena = test.Put(RandomBytes(2 * 4096, 1));
  const DeviceBuffer list = test.Put(std::vector<PagePair>{{1, 0}});
  CopyPagesParams params;
  params.from = arena.data();
  params.to = arena.data();
  params.page_bytes = 4096;
  params.pairs = list.as<PagePair>();
  params.num_pairs = 1;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(CopyPages(test.stream(), params, none));
  KVASIR_EXPECT_OK(test.stream().Synchronize());
  const auto accesses = test.emulator().Accesses("copy_pages");
  ASSERT_EQ(accesses.size(), 2u);
  for (const AccessCount& access : accesses) {
    EXPECT_EQ(access.bytes, 4096);
    EXPECT_EQ(access.sectors, 4096 / 32);
  }
}

TEST(CopyPagesCudaTest, AnEmptyListOfPagePairsCopiesNothing) {
  EmulatedTest test;
  const std::vector<char> bytes = RandomBytes(64, 1);
  const DeviceBuffer arena = test.Put(bytes);
  CopyPagesParams params;
  params.from = arena.data();
  params.to = arena.data();
  params.page_bytes = 32;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(CopyPages(test.stream(), params, none));
  EXPECT_TRUE(test.Get<char>(arena) == bytes);
}

}  // namespace
}  // namespace kvasir::kernels::emulation
