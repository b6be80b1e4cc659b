// Tests the kernels of ops on rows, such as norm and rope, against the
// reference implementations, with several seeds and odd shapes.
#include <gmock/gmock.h>

#include <vector>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/rowwise/ops.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::emulation {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();

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
  EXPECT_LE(WorstError(want.out, got.out, c.columns), ToleranceOf(c.dtype));
  if (!c.in_place) {
    EXPECT_LE(WorstError(want.x, got.x, c.columns), ToleranceOf(c.dtype));
  }
}

TEST(NormCudaTest, TheNormEqualsTheReferenceWithinTheToleranceOfTheNumberType) {
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

// The rows are heads inside the rows of tokens. Heads of 64 and 24 numbers
// are read in packs of 16 bytes if the distance of tokens is a multiple of
// 16 bytes.
TEST(NormCudaTest, RowsThatArePartsOfLongerRowsEqualTheReference) {
  struct Parts {
    int64_t tokens, parts, columns, first, stride;
  };
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const Parts& c : {Parts{3, 4, 64, 64, 448}, Parts{2, 1, 24, 8, 40},
                           Parts{4, 2, 24, 3, 55}, Parts{2, 3, 10, 0, 30}}) {
      SCOPED_TRACE(testing::Message()
                   << c.tokens << " tokens of " << c.parts << " heads of "
                   << c.columns << " " << DTypeName(dtype));
      EmulatedTest test(++seed);
      const auto numbers = Rounded(RandomFloats(c.tokens * c.stride, 1), dtype);
      const auto weight = RandomFloats(c.columns, 2);
      std::vector<float> want = numbers;
      NormArgs args;
      args.x = want.data() + c.first;
      args.out = args.x;
      args.weight = weight.data();
      args.num_rows = c.tokens * c.parts;
      args.columns = c.columns;
      args.num_parts = c.parts;
      args.stride = c.stride;
      TestStream reference(1, CpuBackend::kReference);
      KVASIR_EXPECT_OK(
          Norm(reference.stream(), OnDevice(args), reference.workspace()));
      const DeviceBuffer memory = test.PutNumbers(numbers, dtype);
      const DeviceBuffer weights = test.Put(weight);
      NormParams params;
      params.x = (memory.as<char>() + c.first * DTypeBytes(dtype)).as<float>();
      params.out = params.x;
      params.weight = weights.as<float>();
      params.num_rows = args.num_rows;
      params.columns = c.columns;
      params.num_parts = c.parts;
      params.stride = c.stride;
      params.dtype = dtype;
      Workspace none(nullptr, 0);
      KVASIR_EXPECT_OK(Norm(test.stream(), params, none));
      const auto got = test.GetNumbers(memory, dtype);
      EXPECT_LE(WorstError(want, got, c.stride), ToleranceOf(dtype));
      for (size_t i = 0; i < got.size(); ++i) {
        if (want[i] != numbers[i]) continue;  // the number belongs to a head
        EXPECT_EQ(got[i], numbers[i]) << i;
      }
    }
  }
}

TEST(NormCudaTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
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

TEST(NormCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  const NormCase c = {NormKind::kLayer, DType::kF32, 2, 600};
  const NormData data(c);
  const NormResult want = NormByReference(c, data);
  const auto mutants = LeaveOutEach("norm", kSeeds, [&](EmulatedTest& test) {
    return WorstError(want.out, NormByKernel(c, data, test).out, c.columns) <=
           ToleranceOf(c.dtype);
  });
  // the kernel has one barrier for each of two sums
  ASSERT_EQ(mutants.size(), 2u);
  for (const Mutant& mutant : mutants) {
    EXPECT_EQ(mutant.site.kind, "SyncCta");
    EXPECT_EQ(mutant.site.file, "norm_cuda.cu");
    EXPECT_NE(mutant.verdict, Verdict::kRight) << mutant.site.line;
  }
}

// The bits of a result depend on the width of the kernel's reads, which
// determines the order of additions. If this width depended on addresses,
// results could differ between runs. Therefore unaligned rows are refused.
TEST(NormCudaTest, RowsThatAreReadIn16BytePacksMustBeAligned) {
  EmulatedTest test;
  const DeviceBuffer memory = test.Memory(256);
  const auto half = memory.as<Bf16>() + 64;
  NormParams params;
  params.x = memory.as<float>();
  params.weight = memory.as<float>();
  params.out = half.as<float>();
  params.num_rows = 1;
  params.columns = 8;
  params.dtype = DType::kBf16;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Norm(test.stream(), params, none));
  const auto shifted = memory.as<Bf16>() + 1;
  const auto refused = [](const char* name) {
    return base::StatusIs(
        absl::StatusCode::kInvalidArgument,
        testing::StartsWith(absl::StrCat(
            "norm: ", name,
            ": with rows of 8 BF16 numbers, the address must be a multiple of "
            "16 bytes, but is 2 bytes above such a multiple")));
  };
  NormParams wrong = params;
  wrong.x = shifted.as<float>();
  EXPECT_THAT(Norm(test.stream(), wrong, none), refused("x"));
  wrong = params;
  wrong.residual = shifted.as<const float>();
  EXPECT_THAT(Norm(test.stream(), wrong, none), refused("residual"));
  wrong = params;
  wrong.weight = shifted.as<const float>();
  EXPECT_THAT(Norm(test.stream(), wrong, none), refused("weight"));
  wrong = params;
  wrong.bias = shifted.as<const float>();
  EXPECT_THAT(Norm(test.stream(), wrong, none), refused("bias"));
  wrong = params;
  wrong.out = (half + 1).as<float>();
  EXPECT_THAT(Norm(test.stream(), wrong, none), refused("out"));
  // Rows of 14 bytes may begin at any address.
  wrong.columns = 7;
  KVASIR_EXPECT_OK(Norm(test.stream(), wrong, none));
}

TEST(NormCudaTest, RowsAreReadInWholeSectors) {
  const NormCase c = {NormKind::kRms, DType::kBf16, 2, 4096};
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  (void)NormByKernel(c, NormData(c), test);
  const int64_t numbers = c.rows * c.columns;
  int64_t loaded = 0, stored = 0, weights = 0;
  for (const AccessCount& count : test.emulator().Accesses("norm")) {
    // Each thread loads eight float32 weights in two accesses.
    const bool of_weights =
        count.kind == "global load" && count.bytes == 4 * numbers;
    EXPECT_EQ(count.sectors, (of_weights ? 2 : 1) * count.least_sectors)
        << count.kind << " at " << count.line;
    EXPECT_EQ(count.passes, count.least_passes)
        << count.kind << " at " << count.line;
    if (of_weights) {
      weights += count.bytes;
    } else if (count.kind == "global load") {
      loaded += count.bytes;
    } else if (count.kind == "global store") {
      stored += count.bytes;
    }
  }
  EXPECT_EQ(weights, 4 * numbers);
  EXPECT_EQ(loaded, 2 * 2 * numbers);  // x and the residual are each read once
  EXPECT_EQ(stored, 2 * 2 * numbers);  // x and out are each written once
}

// Returns `numbers` with `ahead` poisoned numbers before them, so that
// `numbers` begin at an address that is not aligned for wide accesses.
std::vector<float> Behind(int64_t ahead, const std::vector<float>& numbers) {
  if (numbers.empty()) return {};
  std::vector<float> all(static_cast<size_t>(ahead), kPoison);
  all.insert(all.end(), numbers.begin(), numbers.end());
  return all;
}
// Values of `ahead` (see Behind) for tests of a type. To save time, unaligned
// rows are tested with bf16 only.
std::vector<int64_t> AheadOf(DType dtype) {
  return dtype == DType::kBf16 ? std::vector<int64_t>{0, 1}
                               : std::vector<int64_t>{0};
}
std::vector<float> From(int64_t ahead, const std::vector<float>& numbers) {
  if (numbers.empty()) return {};
  return {numbers.begin() + ahead, numbers.end()};
}
template <typename T>
DevicePtr<T> Number(const DeviceBuffer& buffer, DType dtype, int64_t index) {
  if (buffer.bytes() == 0) return nullptr;
  return (buffer.as<char>() + index * DTypeBytes(dtype)).template as<T>();
}

// `ahead` is how many poisoned numbers precede the input and the output in
// memory (see Behind).
std::vector<float> GateByKernel(EmulatedTest& test, DType dtype, int64_t rows,
                                int64_t features,
                                const std::vector<float>& gate_up,
                                int64_t ahead = 0,
                                GateKind kind = GateKind::kSilu) {
  const DeviceBuffer in = test.PutNumbers(Behind(ahead, gate_up), dtype);
  const DeviceBuffer out = test.PutNumbers(
      Behind(ahead,
             std::vector<float>(static_cast<size_t>(rows * features), kPoison)),
      dtype);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(
      SiluMul(test.stream(),
              {Number<float>(in, dtype, ahead),
               Number<float>(out, dtype, ahead), rows, features, dtype, kind},
              none));
  return From(ahead, test.GetNumbers(out, dtype));
}

std::vector<float> GateByReference(int64_t rows, int64_t features,
                                   const std::vector<float>& gate_up,
                                   GateKind kind) {
  std::vector<float> out(static_cast<size_t>(rows * features));
  SiluMulArgs args = {gate_up.data(), out.data(), rows, features};
  args.gate = kind;
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      SiluMul(reference.stream(), OnDevice(args), reference.workspace()));
  return out;
}

// The last shape has more rows than there are resident CTAs.
constexpr std::pair<int64_t, int64_t> kShapes[] = {
    {0, 3}, {1, 1}, {1, 256}, {5, 77}, {3, 2056}, {18, 1000}};

TEST(SiluMulCudaTest,
     SiluMulEqualsTheReferenceWithinTheToleranceOfTheNumberType) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const GateKind kind : {GateKind::kSilu, GateKind::kGeluTanh}) {
      EmulatedTest test(++seed, /*multiprocessors=*/1);
      for (const auto& [rows, features] : kShapes) {
        const auto gate_up =
            Rounded(RandomFloats(rows * 2 * features, 1, 4.0f), dtype);
        const auto want = GateByReference(rows, features, gate_up, kind);
        for (const int64_t ahead : AheadOf(dtype)) {
          const auto got =
              GateByKernel(test, dtype, rows, features, gate_up, ahead, kind);
          EXPECT_LE(WorstError(want, got, features), ToleranceOf(dtype))
              << rows << " rows of " << features << " " << DTypeName(dtype)
              << ", " << ahead << " ahead";
        }
      }
    }
  }
}

TEST(SiluMulCudaTest, LargeGatesGiveTheLimitsOfSilu) {
  for (const DType dtype : kDTypes) {
    const std::vector<float> gate_up = {
        100.0f, -100.0f, 3e4f, -3e4f, INFINITY, -INFINITY, kPoison, -88.0f,
        2.0f,   2.0f,    2.0f, 2.0f,  2.0f,     2.0f,      2.0f,    2.0f};
    EmulatedTest test;
    const std::vector<float> out = GateByKernel(test, dtype, 1, 8, gate_up);
    EXPECT_EQ(out[0], 200.0f);
    EXPECT_EQ(out[1], 0.0f);
    EXPECT_NEAR(out[2], 6e4f,
                300.0f);  // the stored result is rounded to `dtype`
    EXPECT_EQ(out[3], 0.0f);
    EXPECT_EQ(out[4], INFINITY);
    EXPECT_EQ(out[5], 0.0f);
    EXPECT_NE(out[6], out[6]);
    EXPECT_NEAR(out[7], 0.0f, 1e-30f);
  }
}

std::vector<float> ActivateByKernel(EmulatedTest& test, DType dtype,
                                    ActivationKind kind, int64_t rows,
                                    int64_t columns,
                                    const std::vector<float>& numbers,
                                    bool in_place, int64_t ahead = 0) {
  const DeviceBuffer x = test.PutNumbers(Behind(ahead, numbers), dtype);
  const DeviceBuffer out = test.PutNumbers(
      Behind(ahead, std::vector<float>(numbers.size(), kPoison)), dtype);
  const DeviceBuffer& to = in_place ? x : out;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(
      Activation(test.stream(),
                 {Number<float>(x, dtype, ahead),
                  Number<float>(to, dtype, ahead), rows, columns, kind, dtype},
                 none));
  return From(ahead, test.GetNumbers(to, dtype));
}

std::vector<float> ActivateByReference(ActivationKind kind, int64_t rows,
                                       int64_t columns,
                                       const std::vector<float>& numbers) {
  std::vector<float> out(numbers.size());
  const ActivationArgs args = {numbers.data(), out.data(), rows, columns, kind};
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Activation(reference.stream(), OnDevice(args), reference.workspace()));
  return out;
}

constexpr ActivationKind kKinds[] = {
    ActivationKind::kGelu, ActivationKind::kGeluTanh, ActivationKind::kRelu};

TEST(ActivationCudaTest,
     ActivationsEqualTheReferenceAlsoIfTheyAreComputedInPlace) {
  uint64_t seed = 0;
  for (const ActivationKind kind : kKinds) {
    for (const DType dtype : kDTypes) {
      EmulatedTest test(++seed, /*multiprocessors=*/1);
      for (const auto& [rows, columns] : kShapes) {
        // x has numbers so large and so small that the activation function
        // reaches both of its limits.
        const auto x = Rounded(RandomFloats(rows * columns, 1, 4.0f), dtype);
        const auto want = ActivateByReference(kind, rows, columns, x);
        for (const int64_t ahead : AheadOf(dtype)) {
          const auto got = ActivateByKernel(test, dtype, kind, rows, columns, x,
                                            /*in_place=*/rows == 5, ahead);
          EXPECT_LE(WorstError(want, got, columns), ToleranceOf(dtype))
              << rows << " rows of " << columns << " " << DTypeName(dtype)
              << ", kind " << static_cast<int>(kind) << ", " << ahead
              << " ahead";
        }
      }
    }
  }
}

TEST(ActivationCudaTest, CappedLogitsEqualTheReference) {
  constexpr float kCap = 30.0f;
  for (const DType dtype : kDTypes) {
    EmulatedTest test;
    auto x = Rounded(RandomFloats(3 * 77, 1, 40.0f), dtype);
    x[0] = INFINITY;
    x[1] = -INFINITY;
    std::vector<float> want(x.size());
    const ActivationArgs args = {
        x.data(),    want.data(), 3, 77, ActivationKind::kSoftCap,
        DType::kF32, kCap};
    TestStream reference(1, CpuBackend::kReference);
    KVASIR_EXPECT_OK(
        Activation(reference.stream(), OnDevice(args), reference.workspace()));
    const DeviceBuffer memory = test.PutNumbers(x, dtype);
    const auto at = memory.as<float>();
    Workspace none(nullptr, 0);
    KVASIR_EXPECT_OK(Activation(
        test.stream(), {at, at, 3, 77, ActivationKind::kSoftCap, dtype, kCap},
        none));
    EXPECT_LE(WorstError(want, test.GetNumbers(memory, dtype), 77),
              ToleranceOf(dtype));
  }
}

TEST(ActivationCudaTest, LargeInputsGiveTheLimitsOfTheFunction) {
  const std::vector<float> x = {13.0f,  -13.0f, 15.0f, -15.0f,   89.0f,
                                -89.0f, 3e4f,   -3e4f, INFINITY, -INFINITY};
  for (const ActivationKind kind : kKinds) {
    for (const DType dtype : kDTypes) {
      EmulatedTest test;
      const auto count = static_cast<int64_t>(x.size());
      const auto out =
          ActivateByKernel(test, dtype, kind, 1, count, x, /*in_place=*/false);
      for (size_t i = 0; i < x.size(); ++i) {
        const float limit = std::max(Rounded(x, dtype)[i], 0.0f);
        EXPECT_TRUE(out[i] == limit || std::abs(out[i]) < 1e-30f)
            << x[i] << " gives " << out[i];
      }
      const float nan =
          ActivateByKernel(test, dtype, kind, 1, 1, {kPoison}, false)[0];
      EXPECT_NE(nan, nan);
    }
  }
}

struct RowsCase {
  DType dtype;
  int64_t rows;
  int64_t columns;
  int64_t y_stride;
  int64_t x_stride;  // 0: the same row is added to all rows
  int64_t ahead = 0;
};

// Adds rows and compares bit by bit, because each sum is rounded only once.
void ExpectAddedRows(EmulatedTest& test, const RowsCase& c) {
  SCOPED_TRACE(testing::Message()
               << c.rows << " rows of " << c.columns << " "
               << DTypeName(c.dtype) << " " << c.y_stride << " and "
               << c.x_stride << " apart, " << c.ahead << " ahead");
  const DType x_dtype = c.x_stride == 0 ? DType::kF32 : c.dtype;
  const int64_t x_rows = c.x_stride == 0 ? 1 : c.rows;
  const int64_t x_numbers = c.x_stride == 0 ? c.columns : x_rows * c.x_stride;
  const auto start = Rounded(RandomFloats(c.rows * c.y_stride, 1), c.dtype);
  const auto x = Rounded(RandomFloats(x_numbers, 2), x_dtype);
  std::vector<float> want = start;
  AddRowsArgs args = {want.data(), c.y_stride, x.data(),
                      c.x_stride,  c.rows,     c.columns};
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      AddRows(reference.stream(), OnDevice(args), reference.workspace()));

  const DeviceBuffer on_y = test.PutNumbers(Behind(c.ahead, start), c.dtype);
  const DeviceBuffer on_x = test.PutNumbers(Behind(c.ahead, x), x_dtype);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(AddRows(test.stream(),
                           {Number<float>(on_y, c.dtype, c.ahead), c.y_stride,
                            Number<const float>(on_x, x_dtype, c.ahead),
                            c.x_stride, c.rows, c.columns, c.dtype},
                           none));
  EXPECT_TRUE(SameBits(Rounded(want, c.dtype),
                       From(c.ahead, test.GetNumbers(on_y, c.dtype))));
}

TEST(AddRowsCudaTest,
     AddsEachRowOrOneFloat32BiasToAllRowsAndWritesNothingElse) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t ahead : AheadOf(dtype)) {
      EmulatedTest test(++seed, /*multiprocessors=*/1);
      for (const RowsCase& c : std::vector<RowsCase>{{dtype, 0, 5, 5, 5},
                                                     {dtype, 1, 1, 1, 1},
                                                     {dtype, 1, 64, 64, 64},
                                                     {dtype, 7, 72, 80, 96},
                                                     {dtype, 7, 72, 75, 72},
                                                     {dtype, 7, 72, 80, 73},
                                                     {dtype, 5, 77, 80, 80},
                                                     {dtype, 18, 1000, 1000, 0},
                                                     {dtype, 3, 2056, 2056, 0},
                                                     {dtype, 9, 33, 40, 0}}) {
        RowsCase moved = c;
        moved.ahead = ahead;
        ExpectAddedRows(test, moved);
      }
    }
  }
}

void ExpectSummedRows(EmulatedTest& test, const RowsCase& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " rows of " << c.columns << " "
                                  << DTypeName(c.dtype) << " " << c.x_stride
                                  << " apart, " << c.ahead << " ahead");
  auto x = Rounded(RandomFloats(c.rows * c.x_stride, 1), c.dtype);
  std::vector<float> want(static_cast<size_t>(c.columns));
  SumRowsArgs args = {x.data(), c.x_stride, want.data(), c.rows, c.columns};
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      SumRows(reference.stream(), OnDevice(args), reference.workspace()));

  const DeviceBuffer on_x = test.PutNumbers(Behind(c.ahead, x), c.dtype);
  const DeviceBuffer on_out = test.PutNumbers(
      std::vector<float>(want.size() + static_cast<size_t>(c.ahead), kPoison),
      c.dtype);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(SumRows(
      test.stream(),
      {Number<const float>(on_x, c.dtype, c.ahead), c.x_stride,
       Number<float>(on_out, c.dtype, c.ahead), c.rows, c.columns, c.dtype},
      none));
  EXPECT_TRUE(SameBits(Rounded(want, c.dtype),
                       From(c.ahead, test.GetNumbers(on_out, c.dtype))));
}

TEST(SumRowsCudaTest, AddsRowsInOrderAndRoundsTheSumOnce) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t ahead : AheadOf(dtype)) {
      EmulatedTest test(++seed, /*multiprocessors=*/1);
      for (const RowsCase& c :
           std::vector<RowsCase>{{dtype, 1, 1, 1, 1},
                                 {dtype, 2, 64, 64, 64},
                                 {dtype, 3, 72, 72, 73},
                                 {dtype, 8, 77, 77, 77},
                                 {dtype, 5, 5000, 5000, 5000}}) {
        RowsCase moved = c;
        moved.ahead = ahead;
        ExpectSummedRows(test, moved);
      }
    }
  }
}

struct GatherCase {
  DType dtype;
  int64_t rows;
  int64_t columns;
  int64_t x_stride;
  int64_t out_stride;
  bool listed = true;
  int64_t ahead = 0;
};

void ExpectGatheredRows(EmulatedTest& test, const GatherCase& c) {
  SCOPED_TRACE(testing::Message()
               << c.rows << " rows of " << c.columns << " "
               << DTypeName(c.dtype) << " " << c.x_stride << " and "
               << c.out_stride << " apart, " << c.ahead << " ahead");
  const int64_t sources = c.rows + 3;
  auto x = Rounded(RandomFloats(sources * c.x_stride, 1), c.dtype);
  std::vector<int32_t> rows;
  for (int64_t t = 0; t < c.rows; ++t) {
    rows.push_back(static_cast<int32_t>((t * 5 + 2) % sources));
  }
  const std::vector<float> start(static_cast<size_t>(c.rows * c.out_stride),
                                 -7.0f);
  std::vector<float> want = start;
  GatherRowsArgs args = {
      x.data(),    c.x_stride,   c.listed ? rows.data() : nullptr,
      want.data(), c.out_stride, c.rows,
      c.columns};
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      GatherRows(reference.stream(), OnDevice(args), reference.workspace()));

  const DeviceBuffer on_x = test.PutNumbers(Behind(c.ahead, x), c.dtype);
  const DeviceBuffer on_rows = test.Put(rows);
  const DeviceBuffer out = test.PutNumbers(Behind(c.ahead, start), c.dtype);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(GatherRows(
      test.stream(),
      {Number<const float>(on_x, c.dtype, c.ahead), c.x_stride,
       c.listed ? on_rows.as<const int32_t>() : DevicePtr<const int32_t>(),
       Number<float>(out, c.dtype, c.ahead), c.out_stride, c.rows, c.columns,
       c.dtype},
      none));
  EXPECT_TRUE(SameBits(want, From(c.ahead, test.GetNumbers(out, c.dtype))));
}

TEST(GatherRowsCudaTest, CopiesTheListedRowsAndWritesNothingElse) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t ahead : AheadOf(dtype)) {
      EmulatedTest test(++seed, /*multiprocessors=*/1);
      for (const GatherCase& c :
           std::vector<GatherCase>{{dtype, 0, 5, 5, 5},
                                   {dtype, 3, 0, 5, 5},
                                   {dtype, 1, 1, 1, 1},
                                   {dtype, 5, 64, 64, 64, false},
                                   {dtype, 7, 72, 80, 96},
                                   {dtype, 7, 72, 75, 72},
                                   {dtype, 7, 72, 80, 73},
                                   {dtype, 5, 77, 80, 80, false},
                                   {dtype, 18, 1000, 1000, 1008},
                                   {dtype, 3, 2056, 2056, 2056},
                                   {dtype, 2100, 1, 1, 1}}) {
        GatherCase moved = c;
        moved.ahead = ahead;
        ExpectGatheredRows(test, moved);
      }
    }
  }
}

// Callers also gather ids and counts as rows of one number, so bits that are no
// valid float must be copied unchanged.
TEST(GatherRowsCudaTest, CopiesRowsOfEveryNumberTypeBitByBit) {
  const std::vector<int32_t> ids = {0x7f800001, -1, 0, 1, -0x7fffffff};
  EmulatedTest test;
  const DeviceBuffer x = test.Put(ids);
  const DeviceBuffer out = test.Put(std::vector<int32_t>(ids.size(), 5));
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(
      GatherRows(test.stream(),
                 {x.as<const float>(), 1, {}, out.as<float>(), 1, 5, 1}, none));
  EXPECT_EQ(test.Get<int32_t>(out), ids);
}

struct EmbeddingCase {
  DType dtype;        // type of activations
  DType table_dtype;  // type of the table and of the position table
  std::vector<int32_t> ids;
  int64_t hidden;
  bool positions = false;
  bool tied = false;
  int64_t first_id = 0;
  float scale = 1.0f;
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
  params.first_id = c.first_id;
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
  params.scale = c.scale;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Embedding(test.stream(), params, none));
  return test.GetNumbers(out, c.dtype);
}

void ExpectEmbedding(EmulatedTest& test, const EmbeddingCase& c) {
  constexpr int64_t kVocab = 11;
  constexpr int64_t kPlaces = 5;
  const auto table = Rounded(RandomFloats(kVocab * c.hidden, 1), c.table_dtype);
  const auto places =
      Rounded(RandomFloats(kPlaces * c.hidden, 2), c.table_dtype);
  std::vector<int64_t> positions;
  for (size_t t = 0; t < c.ids.size(); ++t) {
    // The positions are -1, 2, 5, ...; the table has only 2.
    positions.push_back(static_cast<int64_t>(3 * t) - 1);
  }
  std::vector<float> want(c.ids.size() * static_cast<size_t>(c.hidden));
  EmbeddingArgs args;
  args.ids = c.ids.data();
  args.num_tokens = static_cast<int64_t>(c.ids.size());
  args.first_id = c.first_id;
  args.vocab = kVocab;
  args.hidden = c.hidden;
  args.table = table.data();
  args.position_table = c.positions ? places.data() : nullptr;
  args.num_positions = kPlaces;
  args.positions = positions.data();
  args.scale = c.scale;
  args.out = want.data();
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Embedding(reference.stream(), OnDevice(args), reference.workspace()));
  const auto got = EmbedByKernel(test, c, args, table, places, positions);
  // Without positions nothing is added, so the only error is the rounding to
  // the stored type.
  EXPECT_LE(WorstError(Rounded(want, c.dtype), got, c.hidden),
            c.positions ? ToleranceOf(c.dtype) : 0.0)
      << DTypeName(c.dtype) << " of " << DTypeName(c.table_dtype);
}

TEST(EmbeddingCudaTest, TheEmbeddingEqualsTheReference) {
  for (const DType dtype : kDTypes) {
    for (const DType table : kDTypes) {
      EmulatedTest test;
      ExpectEmbedding(test, {dtype, table, {}, 8});
      ExpectEmbedding(test, {dtype, table, {10}, 1});
      ExpectEmbedding(test, {dtype, table, {3, -1, 11, 0, 3}, 300});
      ExpectEmbedding(test, {dtype, table, {3, -1, 5}, 70, true});
      ExpectEmbedding(test, {dtype, table, {2, 9}, 70, false, true});
      ExpectEmbedding(test, {dtype, table, {2, 9}, 70, true, true, 0, 8.75f});
      ExpectEmbedding(test,
                      {dtype, table, {5, 20, 30, 31}, 9, true, false, 20});
      ExpectEmbedding(test,
                      {dtype, table, {20, 19, 30, 0}, 70, false, true, 20});
    }
  }
}

TEST(EmbeddingCudaTest, ATablePackedInPanelsIsRefused) {
  EmulatedTest test;
  EmbeddingParams params;
  params.vocab = 1;
  params.hidden = 1;
  params.packed.n = 1;
  params.packed.k = 1;
  Workspace none(nullptr, 0);
  EXPECT_THAT(
      Embedding(test.stream(), params, none),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          testing::HasSubstr("the weight layout of another kind of device")));
}

// A case of rope. All heads of q have the same layout; each head of k has its
// own list of pairs.
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
  Workspace none(nullptr, 0);
  auto rope =
      Prepare(test.device(), data.shape, {{}, data.k_heads, data.steps});
  KVASIR_EXPECT_OK(rope.status());
  KVASIR_EXPECT_OK(Rope(
      test.stream(), *rope,
      {q.as<float>(), k.as<float>(), positions.as<int64_t>(), c.tokens}, none));
  data.q = test.GetNumbers(q, c.dtype);
  data.k = test.GetNumbers(k, c.dtype);
  return data;
}

TEST(RopeCudaTest, RopeEqualsTheReferenceWithinTheToleranceOfTheNumberType) {
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
        EXPECT_LE(WorstError(want.q, got.q, want.q_stride), ToleranceOf(dtype))
            << seed;
        EXPECT_LE(WorstError(want.k, got.k, want.k_stride), ToleranceOf(dtype))
            << seed;
      }
    }
  }
}

// Every CTA reads the table of angle steps (35 entries of 8 bytes), so the
// bytes read tell how many CTAs share a token.
TEST(RopeCudaTest, SeveralCtasShareATokenOnlyIfThereAreFewTokens) {
  for (const int64_t tokens : {1, 20}) {
    const RopeCase c = {
        DType::kBf16, RopePairing::kHalfSplit, tokens, 30, 80, 70};
    EmulatedTest test(1, 4, /*count_accesses=*/true);
    (void)RopeByKernel(test, c);
    std::vector<int64_t> loaded;
    for (const AccessCount& count : test.emulator().Accesses("rope")) {
      if (count.kind == "global load") loaded.push_back(count.bytes);
    }
    const int64_t ctas = tokens == 1 ? 5 : 1;
    EXPECT_THAT(loaded, testing::Contains(tokens * ctas * 35 * 8));
  }
}

TEST(RopeCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  const RopeCase c = {DType::kF32, RopePairing::kHalfSplit, 2, 4, 64, 64};
  const RopeData want = RopeByReference(c);
  const auto mutants = LeaveOutEach("rope", kSeeds, [&](EmulatedTest& test) {
    return WorstError(want.q, RopeByKernel(test, c).q, want.q_stride) <=
           ToleranceOf(c.dtype);
  });
  ASSERT_EQ(mutants.size(), 1u);
  EXPECT_EQ(mutants[0].site.kind, "SyncCta");
  EXPECT_NE(mutants[0].verdict, Verdict::kRight);
}

TEST(LaunchDeathTest, ALaunchWithMoreRowsThanAGridCanHaveEndsTheProcess) {
  EXPECT_EQ(emulated::simt::Ctas((int64_t{1} << 31) - 1), 0x7fffffffu);
  EXPECT_EQ(emulated::simt::Ctas(513, 256), 3u);
  EXPECT_DEATH((void)emulated::simt::Ctas(int64_t{1} << 31), "most");
  EXPECT_DEATH((void)emulated::simt::Ctas(65536, 1, emulated::simt::kMostCtasY),
               "most");
}

}  // namespace
}  // namespace kvasir::kernels::emulation
