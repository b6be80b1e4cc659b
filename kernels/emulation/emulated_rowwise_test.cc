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

}  // namespace
}  // namespace kvasir::kernels::emulation
