// Compares the GPU's attention kernels with the CPU's for the shapes of real
// models. On a GPU the contexts are long; on the emulated device they have only
// a few splits, because it is slow.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention/ops.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels::emulation {
namespace {

// Copies a cache and the rows of a launch to a device, and runs attention
// there.
class ShapesLaunch {
 public:
  // `cache` has the latents in the device's layout, in host memory. `args` has
  // the rows and sequences, also in host memory.
  ShapesLaunch(EmulatedTest& test, LatentCache& cache,
               const PagedAttentionArgs& args, DType dtype)
      : test_(test), dtype_(dtype), host_(cache.Params()) {
    shape_ = OnDevice(host_);
    shape_.dtype = dtype;
    for (int64_t p = 0; p < host_.num_key_parts; ++p) {
      const AttentionKeyPartArgs& part = host_.keys[p];
      keys_.push_back({Latents(cache.parts()[static_cast<size_t>(p)]),
                       part.group_of_head, part.query_column, nullptr,
                       nullptr});
    }
    for (int64_t p = 0; p < host_.num_value_parts; ++p) {
      const AttentionValuePartArgs& part = host_.values[p];
      const auto at = static_cast<size_t>(host_.num_key_parts + p);
      values_.push_back({Latents(cache.parts()[at]), part.group_of_head,
                         part.out_column, nullptr, nullptr});
    }
    shape_.keys = keys_.data();
    shape_.values = values_.data();
    int64_t rows = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) {
      AttentionSequence sequence = args.sequences[s];
      const int64_t slots = sequence.first_slot + sequence.num_rows;
      const int64_t pages = (slots + host_.page_tokens - 1) / host_.page_tokens;
      const int32_t* const table = sequence.block_table.device_address();
      buffers_.push_back(test.Put(std::vector<int32_t>(table, table + pages)));
      sequence.block_table = buffers_.back().as<int32_t>();
      sequence.side_pages = nullptr;
      sequences_.push_back(sequence);
      rows = std::max(rows, sequence.first_row + sequence.num_rows);
    }
    q_ = test.PutNumbers({args.q, args.q + rows * args.q_row_stride}, dtype);
    out_ = test.PutNumbers(
        std::vector<float>(static_cast<size_t>(rows * args.out_row_stride),
                           kPoison),
        dtype);
    on_device_ = test.Put(sequences_);
  }

  std::vector<float> Run(int64_t most_partials) {
    shape_.most_partials = most_partials;
    auto prepared = Prepare(test_.device(), shape_);
    KVASIR_EXPECT_OK(prepared.status());
    if (!prepared.ok()) return {};
    auto step = DivideStep(*prepared, sequences_);
    KVASIR_EXPECT_OK(step.status());
    const AttentionRows rows = {q_.as<float>(), out_.as<float>(),
                                on_device_.as<AttentionSequence>(),
                                static_cast<int64_t>(sequences_.size())};
    Workspace counter = Workspace::Counting();
    KVASIR_EXPECT_OK(
        PagedAttention(test_.stream(), *prepared, rows, *step, counter));
    const DeviceBuffer memory = test_.Memory(counter.peak_bytes());
    Workspace workspace = EmulatedTest::WorkspaceOf(memory);
    KVASIR_EXPECT_OK(
        PagedAttention(test_.stream(), *prepared, rows, *step, workspace));
    return test_.GetNumbers(out_, dtype_);
  }

 private:
  LatentPart Latents(const TestPart& from) {
    LatentPart part = OnDevice(from.part);
    buffers_.push_back(test_.Put(from.memory()));
    part.arena = buffers_.back().data();
    return part;
  }

  EmulatedTest& test_;
  const DType dtype_;
  const PagedAttentionArgs host_;
  PagedAttentionParams shape_;
  std::vector<AttentionKeyPart> keys_;
  std::vector<AttentionValuePart> values_;
  std::vector<AttentionSequence> sequences_;
  std::vector<DeviceBuffer> buffers_;
  DeviceBuffer q_, out_, on_device_;
};

struct ShapeCase {
  std::string name;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  PartSpec key;
  PartSpec value;
  // The number of cached tokens of each sequence on a GPU. The emulator uses
  // shorter contexts, see ForEmulator().
  std::vector<int64_t> contexts;
  int64_t rows = 1;  // each sequence has queries for this many last tokens
};

// Reduces a case for the slow emulator. The result has few heads and rows. One
// of its two contexts is shorter than a split, the other slightly longer.
ShapeCase ForEmulator(ShapeCase test) {
  const int64_t group = test.heads / test.kv_heads;
  test.kv_heads = std::min<int64_t>(test.kv_heads, 2);
  test.heads = group * test.kv_heads;
  test.contexts = {70, 520};
  test.rows = std::min<int64_t>(test.rows, 5);
  return test;
}

LatentSpec SpecOf(const ShapeCase& test, int64_t granule_bytes) {
  LatentSpec spec;
  spec.num_heads = test.heads;
  spec.num_kv_heads = test.kv_heads;
  spec.keys = {test.key};
  spec.values = {test.value};
  spec.page_tokens = 64;
  spec.asked_tokens = test.rows;
  for (auto* const side : {&spec.keys, &spec.values}) {
    (*side)[0].granule_bytes = granule_bytes;
  }
  return spec;
}

class AttentionShapesTest : public ::testing::TestWithParam<ShapeCase> {};

TEST_P(AttentionShapesTest,
       GpuAttentionEqualsCpuAttentionWithinTheToleranceOfTheNumberType) {
  const ShapeCase test =
      TakesWholeSizes() ? GetParam() : ForEmulator(GetParam());
  const DType dtype = DType::kBf16;
  EmulatedTest gpu(3);
  // Two caches with the same latents: one in the CPU's layout, one in the
  // GPU's.
  LatentCache cpu_cache(SpecOf(test, 0), test.contexts, 5);
  LatentCache gpu_cache(SpecOf(test, gpu.device().page_granule_bytes()),
                        test.contexts, 5);
  // Filling the caches takes most of the test's time, so all host threads are
  // used.
  cpu_cache.UseThreads(HostThreads());
  gpu_cache.UseThreads(HostThreads());
  std::vector<LatentAsk> asks;
  for (size_t s = 0; s < test.contexts.size(); ++s) {
    const auto sequence = static_cast<int64_t>(s);
    cpu_cache.Write(sequence, 0, test.contexts[s]);
    gpu_cache.Write(sequence, 0, test.contexts[s]);
    asks.push_back({sequence, test.contexts[s] - test.rows, test.rows});
  }
  cpu_cache.RoundQueries(dtype);
  // Runs the launch twice: first with memory for the partial results of all
  // splits, then without any, so that no context is split.
  std::vector<std::vector<float>> got;
  cpu_cache.on_launch = [&](const PagedAttentionArgs& args) {
    ShapesLaunch launch(gpu, gpu_cache, args, dtype);
    for (const int64_t most_partials : {4096, 0}) {
      got.push_back(launch.Run(most_partials));
    }
  };
  TestStream cpu(OnGpu() ? HostThreads()->num_threads() : 1, CpuBackend::kSimd,
                 size_t{1} << 26);
  const std::vector<float> want = cpu_cache.Attend(cpu, asks);
  for (const std::vector<float>& rows : got) {
    ASSERT_EQ(rows.size(), want.size());
    double error = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i])) continue;  // the column belongs to no head
      const double difference = static_cast<double>(rows[i]) - want[i];
      error += difference * difference;
      norm += static_cast<double>(want[i]) * want[i];
    }
    EXPECT_LE(std::sqrt(error / norm), ToleranceOf(dtype));
  }
  // A row's result has the same bits whether its context is split or not.
  EXPECT_TRUE(SameBits(got[0], got[1]));
}

std::vector<ShapeCase> Cases() {
  struct Codec {
    std::string name;
    PartSpec part;
  };
  const std::vector<Codec> codecs = {
      {"bf16", Numbers({128})},
      {"rap50", Numbers({64})},
      {"codes_8", Codes({128}, {8})},
      {"codes_4", Codes({128}, {4})},
      {"rotated_4", Levels(Codes({128}, {4}))},
      {"rap50_codes_4", Codes({64}, {4})},
  };
  std::vector<ShapeCase> cases;
  for (const Codec& codec : codecs) {
    const auto add = [&](const std::string& name, int64_t heads,
                         int64_t kv_heads, std::vector<int64_t> contexts,
                         int64_t rows) {
      cases.push_back({name + "_" + codec.name, heads, kv_heads, codec.part,
                       codec.part, std::move(contexts), rows});
    };
    add("llama_3_8b", 32, 8, {4096, 32771, 515}, 1);
    add("llama_2_7b", 32, 32, {4099, 8192}, 1);
    add("llama_3_8b_chunk", 32, 8, {4100, 1000}, 200);
    add("long", 4, 1, {131072, 65537}, 1);
  }
  for (int64_t group = 1; group <= 16; ++group) {
    cases.push_back({absl::StrCat("group_of_", group),
                     group,
                     1,
                     Codes({128}, {4}),
                     Numbers({128}),
                     {4096, 1025},
                     1});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionShapesTest,
                         ::testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::kernels::emulation
