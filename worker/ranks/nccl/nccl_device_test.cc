// Tests a group of one rank over NCCL. The test program of kernels/cuda uses a
// GPU and NVIDIA's library. Other builds use the emulated device and the fake
// NCCL library.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/emulation/testing/test_device.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/nccl/nccl_group.h"
#include "worker/ranks/rank.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/graph_steps.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::emulation::MakeTestDevice;
using kernels::emulation::OnGpu;

std::vector<std::string> Libraries() {
  if (OnGpu()) return Nccl::DefaultFiles();
  const char* const fake = std::getenv("KVASIR_FAKE_NCCL_LIBRARY");
  return {fake == nullptr ? "" : fake};
}

class NcclDeviceTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto group = NcclGroup::Begin(
        {.libraries = Libraries(), .deterministic = GetParam()});
    if (OnGpu() && absl::IsNotFound(group.status())) {
      GTEST_SKIP() << "needs NCCL: " << group.status();
    }
    KVASIR_ASSERT_OK(group);
    // NCCL uses the GPU that this thread has selected. MakeTestDevice selects
    // it.
    device_ = MakeTestDevice({});
    const std::vector<std::string> addresses = {(*group)->address()};
    auto connected = std::move(**group).Connect(addresses);
    KVASIR_ASSERT_OK(connected);
    collective_ = *std::move(connected);
  }

  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<Collective> collective_;
};

TEST_P(NcclDeviceTest, CollectiveCallsInAGroupOfOneRankDoNotChangeItsData) {
  HostRank own(collective_.get(), device_.get());
  const std::vector<float> numbers = RankNumbers(0, 5000, 1);
  std::vector<float> data = numbers;
  KVASIR_EXPECT_OK(own.AllReduceSum(&data));
  EXPECT_EQ(data, numbers);
  KVASIR_EXPECT_OK(own.AllGather(&data, 50, {0, 100}));
  EXPECT_EQ(data, numbers);
  std::vector<kernels::Bf16> narrow;
  for (const float number : numbers) {
    narrow.push_back(kernels::FromFloat<kernels::Bf16>(number));
  }
  std::vector<kernels::Bf16> sum = narrow;
  KVASIR_EXPECT_OK(own.AllReduceSum(&sum));
  for (size_t i = 0; i < sum.size(); ++i) {
    ASSERT_EQ(sum[i].bits, narrow[i].bits) << i;
  }
  std::string text = "every byte of it";
  KVASIR_EXPECT_OK(own.Broadcast(&text));
  EXPECT_EQ(text, "every byte of it");
}

// Returns the logits after a prompt and after each of the tokens that follow.
std::vector<std::vector<float>> Logits(Collective* collective) {
  const model::ModelShape shape = {.name = "small-test",
                                   .num_layers = 2,
                                   .hidden_size = 128,
                                   .intermediate_size = 192,
                                   .num_query_heads = 8,
                                   .num_kv_heads = 4,
                                   .head_dim = 32,
                                   .vocab_size = 517,
                                   .max_position = 128};
  std::vector<std::vector<float>> logits;
  const auto run = [&]() -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                            model::SpecOfShape(shape));
    KVASIR_ASSIGN_OR_RETURN(
        const kvasir::v1::KvPlan plan,
        plan::MakePresetPlan(plan::kDensePreset,
                             model::AttentionShapeOf(spec)));
    RandomSource source(shape, 20260, DType::kBf16);
    RankOptions options;
    options.page_tokens = 16;
    options.kv_cache_bytes = 4 << 20;
    options.executor.max_model_len = 128;
    options.executor.max_num_seqs = 4;
    options.executor.max_batched_tokens = 32;
    options.executor.logits_tap = [&](const LogitsRow& row) {
      logits.emplace_back(row.logits.begin(), row.logits.end());
    };
    options.make_device = [](base::ThreadPool*, kernels::CpuBackend, int64_t) {
      return MakeTestDevice({});
    };
    KVASIR_ASSIGN_OR_RETURN(const auto rank, Rank::Create(spec, plan, &source,
                                                          options, collective));
    DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
    const std::vector<int32_t> prompt = {5, 1, 4, 516, 0, 7, 8, 3, 11};
    for (int step = 0; step < 4; ++step) {
      KVASIR_RETURN_IF_ERROR(
          runner
              .Run({{.sequence_id = 1,
                     .token_ids = step == 0 ? prompt : std::vector<int32_t>(),
                     .sample = GreedySample()}})
              .status());
    }
    return absl::OkStatus();
  };
  KVASIR_EXPECT_OK(run());
  return logits;
}

TEST_P(NcclDeviceTest, LogitsOfAGroupOfOneRankAreTheSameWithAndWithoutNccl) {
  const std::vector<std::vector<float>> have = Logits(collective_.get());
  EXPECT_GE(have.size(), 4u);
  EXPECT_EQ(have, Logits(nullptr));
  KVASIR_EXPECT_OK(collective_->status());
  // The 4 steps make at least five collective calls each.
  EXPECT_GE(collective_->totals().calls, 4 * 5);
}

TEST_P(NcclDeviceTest, CollectiveCallsAreReplayedWithTheGraphOfTheirStep) {
  struct Ran {
    std::vector<std::string> results;
    int64_t replayed = 0;
    int64_t calls = 0;
  };
  const auto run = [](Collective* collective, bool graphs) {
    const GraphRank options = {.plan = plan::kDensePreset,
                               .graphs = graphs,
                               .deterministic = true,
                               .make_device = [] { return MakeTestDevice({}); },
                               .collective = collective};
    Ran ran;
    const auto rank = MakeGraphRank(options);
    KVASIR_EXPECT_OK(rank);
    if (!rank.ok()) return ran;
    const int64_t before =
        collective == nullptr ? 0 : collective->totals().calls;
    auto results = RunGraphSteps(**rank, nullptr, kFewGraphSteps);
    KVASIR_EXPECT_OK(results);
    if (!results.ok()) return ran;
    ran.results = *std::move(results);
    ran.replayed = (*rank)->executor().totals().replayed_steps;
    if (collective != nullptr) ran.calls = collective->totals().calls - before;
    return ran;
  };
  const Ran alone = run(nullptr, false);
  const Ran op_by_op = run(collective_.get(), false);
  const Ran replayed = run(collective_.get(), true);
  EXPECT_EQ(alone.results.size(), kFewGraphSteps);
  EXPECT_EQ(op_by_op.results, alone.results);
  EXPECT_EQ(replayed.results, alone.results);
  EXPECT_EQ(op_by_op.replayed, 0);
  EXPECT_EQ(replayed.replayed, 3);
  EXPECT_GT(op_by_op.calls, 4 * 3);
  EXPECT_EQ(replayed.calls, op_by_op.calls);
  KVASIR_EXPECT_OK(collective_->status());
}

INSTANTIATE_TEST_SUITE_P(Sums, NcclDeviceTest, ::testing::Bool(),
                         [](const auto& test) {
                           return test.param ? "InOrder" : "OfNccl";
                         });

}  // namespace
}  // namespace kvasir::worker
