// Runs whole models on ranks that communicate through the NCCL back end and a
// fake NCCL library (testing/fake_nccl.cc), and compares them with the same
// ranks on CPUs. The ranks are threads, each with an emulated GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/op_table/op_table.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/graph_steps.h"
#include "worker/testing/nccl_ranks.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kernels::DType;
using ::testing::HasSubstr;

constexpr size_t kOutput = 3;

// A model shape that can be split over 2 and over 4 ranks.
model::ModelShape SmallShape() {
  return {.name = "small-test",
          .num_layers = 2,
          .hidden_size = 128,
          .intermediate_size = 192,
          .num_query_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 32,
          .vocab_size = 517,
          .max_position = 128};
}

RankOptions SmallOptions() {
  RankOptions options;
  options.page_tokens = 16;
  options.kv_cache_bytes = 4 << 20;
  options.executor.max_model_len = 128;
  options.executor.max_num_seqs = 4;
  options.executor.max_batched_tokens = 32;
  return options;
}

RankOptions EmulatedOptions(DType activations) {
  RankOptions options = SmallOptions();
  options.make_device = [activations](base::ThreadPool*, kernels::CpuBackend,
                                      int64_t limit_bytes) {
    kernels::emulation::EmulatedDeviceOptions device;
    device.memory_limit_bytes = limit_bytes;
    device.activations = activations;
    return std::make_unique<kernels::emulation::EmulatedDevice>(
        device, kernels::emulated::Ops());
  };
  return options;
}

// Options with a long timeout, because emulated kernels are slow.
NcclOptions Patient() { return {.call_timeout = absl::Minutes(2)}; }

absl::StatusOr<std::unique_ptr<Rank>> MakeRank(const RankOptions& options,
                                               Collective* collective) {
  const model::ModelShape shape = SmallShape();
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  KVASIR_ASSIGN_OR_RETURN(
      const kvasir::v1::KvPlan plan,
      plan::MakePresetPlan(plan::kDensePreset, model::AttentionShapeOf(spec)));
  RandomSource source(shape, 20260, DType::kBf16);
  return Rank::Create(spec, plan, &source, options, collective);
}

// The logits of one rank (one row per position) and its output tokens, which
// were either sampled by the rank or given.
struct Forced {
  std::vector<int32_t> output;
  std::vector<std::vector<float>> logits;
};

absl::Status Force(RankOptions options, Collective* collective,
                   Forced* forced) {
  options.executor.logits_tap = [&](const LogitsRow& row) {
    forced->logits.emplace_back(row.logits.begin(), row.logits.end());
  };
  KVASIR_ASSIGN_OR_RETURN(const auto rank, MakeRank(options, collective));
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 19; ++i) prompt.push_back((11 + 97 * i) % 517);
  const bool chooses = forced->output.empty();
  absl::Span<const int32_t> ids(prompt);
  for (size_t i = 0; i <= kOutput; ++i) {
    KVASIR_ASSIGN_OR_RETURN(const auto result,
                            runner.Run({{.sequence_id = 1,
                                         .token_ids = ids,
                                         .sample = GreedySample(),
                                         .output = i > 0}}));
    if (chooses) forced->output.push_back(result.sequences(0).token_id());
    ids = absl::MakeConstSpan(&forced->output[i], 1);
  }
  return absl::OkStatus();
}

std::vector<Forced> ForceAll(
    const RankOptions& options,
    const std::vector<std::unique_ptr<Collective>>& group,
    const std::vector<int32_t>& output) {
  std::vector<Forced> forced(group.size(), Forced{output, {}});
  OnRanks(static_cast<int64_t>(group.size()), [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    const absl::Status status = Force(options, group[r].get(), &forced[r]);
    KVASIR_EXPECT_OK(status) << "rank " << rank;
    if (!status.ok()) group[r]->Abort(status);
  });
  return forced;
}

struct ModelCase {
  std::string name;
  int64_t size = 0;
  DType activations = DType::kF32;
  bool deterministic = false;
  double tolerance = 0;  // limit for |gpu - cpu| / |cpu| of each row
};

class NcclRankTest : public ::testing::TestWithParam<ModelCase> {};

TEST_P(NcclRankTest, LogitsOfNcclRanksEqualThoseOfCpuRanks) {
  const ModelCase& c = GetParam();
  const auto cpus = InProcessGroup::Create(c.size);
  const Forced want = ForceAll(SmallOptions(), cpus, {})[0];
  ASSERT_GT(want.logits.size(), kOutput);
  NcclOptions options = Patient();
  options.deterministic = c.deterministic;
  auto group = MakeNcclRanks(c.size, options);
  ASSERT_EQ(group.size(), static_cast<size_t>(c.size));
  const std::vector<Forced> have =
      ForceAll(EmulatedOptions(c.activations), group, want.output);
  // The 4 steps make at least five collective calls each.
  EXPECT_GE(group[0]->totals().calls, 4 * 5);
  EndRanks(&group);
  EXPECT_EQ(FakeNcclLive(), 0);
  double worst = 0;
  for (const Forced& rank : have) {
    // All ranks must have the same bits.
    EXPECT_EQ(rank.logits, have[0].logits);
    ASSERT_EQ(rank.logits.size(), want.logits.size());
  }
  for (size_t row = 0; row < want.logits.size(); ++row) {
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < want.logits[row].size(); ++i) {
      const double w = want.logits[row][i];
      const double d = have[0].logits[row][i] - w;
      error += d * d;
      norm += w * w;
    }
    worst = std::max(worst, std::sqrt(error / norm));
  }
  RecordProperty("worst_relative_norm", absl::StrCat(worst));
  EXPECT_LE(worst, c.tolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Models, NcclRankTest,
    ::testing::Values(ModelCase{"Two", 2, DType::kF32, false, 1e-3},
                      ModelCase{"TwoInOrder", 2, DType::kF32, true, 1e-3},
                      ModelCase{"TwoOfBf16", 2, DType::kBf16, false, 3e-2},
                      ModelCase{"FourInOrderOfBf16", 4, DType::kBf16, true,
                                3e-2},
                      ModelCase{"Four", 4, DType::kF32, false, 1e-3}),
    [](const auto& test) { return test.param.name; });

// If the group dies while the stream runs a step, the step must fail instead of
// returning a result.
TEST(NcclRankFailureTest, AStepFailsIfItsTensorParallelGroupFailsWhileItRuns) {
  const FakeNcclFaults faults("1:40:hang");
  NcclOptions options;
  options.call_timeout = absl::Seconds(5);
  auto group = MakeNcclRanks(2, options);
  ASSERT_EQ(group.size(), 2u);
  OnRanks(2, [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto made,
        MakeRank(EmulatedOptions(DType::kF32), group[r].get()));
    DirectRunner runner(&made->executor(), &made->layout(), made->pages());
    const std::vector<int32_t> prompt = {5, 1, 4};
    absl::Status ended;
    int steps = 0;
    for (; ended.ok() && steps < 100; ++steps) {
      ended = runner
                  .Run({{.sequence_id = 1,
                         .token_ids = prompt,
                         .sample = GreedySample()}})
                  .status();
    }
    EXPECT_GT(steps, 1);
    EXPECT_THAT(ended, StatusIs(absl::StatusCode::kUnavailable,
                                HasSubstr("stands still")))
        << "rank " << rank;
    EXPECT_EQ(group[r]->status(), ended);
  });
  EndRanks(&group);
}

// The results and counters of all ranks after the steps of graph_steps.h.
struct GraphRun {
  // The results of each rank.
  std::vector<absl::StatusOr<std::vector<std::string>>> results;
  std::vector<ExecutorTotals> totals;
  std::vector<CollectiveTotals> collectives;
};

GraphRun RunGraphs(bool graphs, const NcclOptions& options,
                   size_t most_steps = kFewGraphSteps) {
  auto group = MakeNcclRanks(2, options);
  GraphRun run;
  run.results.resize(group.size());
  run.totals.resize(group.size());
  run.collectives.resize(group.size());
  OnRanks(static_cast<int64_t>(group.size()), [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    const GraphRank made_of = {
        .plan = plan::kDensePreset,
        .graphs = graphs,
        .deterministic = options.deterministic,
        .make_device =
            [] {
              return std::make_unique<kernels::emulation::EmulatedDevice>(
                  kernels::emulation::EmulatedDeviceOptions(),
                  kernels::emulated::Ops());
            },
        .collective = group[r].get()};
    const auto made = MakeGraphRank(made_of);
    KVASIR_ASSERT_OK(made);
    const CollectiveTotals before = group[r]->totals();
    run.results[r] = RunGraphSteps(**made, nullptr, most_steps);
    run.totals[r] = (*made)->executor().totals();
    const CollectiveTotals after = group[r]->totals();
    run.collectives[r] = {after.calls - before.calls,
                          after.sent_bytes - before.sent_bytes};
  });
  EndRanks(&group);
  EXPECT_EQ(FakeNcclLive(), 0);
  return run;
}

TEST(NcclGraphsTest, ReplayedStepsHaveTheSameBitsAndTotalsAsStepsRunOpByOp) {
  for (const bool deterministic : {false, true}) {
    SCOPED_TRACE(deterministic);
    NcclOptions options = Patient();
    options.deterministic = deterministic;
    // If the group is not deterministic, also run two more steps, which have a
    // different number of sequences.
    const size_t most_steps = kFewGraphSteps + (deterministic ? 0 : 2);
    const int64_t captures = deterministic ? 1 : 2;
    const GraphRun want = RunGraphs(false, options, most_steps);
    const GraphRun have = RunGraphs(true, options, most_steps);
    for (size_t r = 0; r < 2; ++r) {
      KVASIR_ASSERT_OK(want.results[r]);
      KVASIR_ASSERT_OK(have.results[r]);
      EXPECT_EQ(*have.results[r], *want.results[r]);
      EXPECT_EQ(want.totals[r].replayed_steps, 0);
      EXPECT_EQ(have.totals[r].captured_steps, captures);
      EXPECT_EQ(have.totals[r].replayed_steps, captures + 2);
      // For each capture, the ranks sum one number to agree on whether all
      // succeeded.
      EXPECT_EQ(have.collectives[r].calls,
                want.collectives[r].calls + captures);
      EXPECT_EQ(have.collectives[r].sent_bytes,
                want.collectives[r].sent_bytes + 4 * captures);
    }
  }
}

// Each step makes five collective calls. The third step is captured, and the
// fault is in one of its calls.
TEST(NcclGraphsTest, NoRankCapturesAStepAgainAfterItsCaptureFailedOnOneRank) {
  const GraphRun want = RunGraphs(false, Patient());
  // With `late`, NCCL continues after the function has returned; that work is
  // captured too.
  for (const auto& [fault, captures] :
       {std::pair("1:13:refuse", 0), std::pair("0:12:late,1:13:late", 1)}) {
    SCOPED_TRACE(fault);
    const FakeNcclFaults faults(fault);
    const GraphRun have = RunGraphs(true, Patient());
    for (size_t r = 0; r < 2; ++r) {
      KVASIR_ASSERT_OK(want.results[r]);
      KVASIR_ASSERT_OK(have.results[r]);
      EXPECT_EQ(*have.results[r], *want.results[r]);
      EXPECT_EQ(have.totals[r].captured_steps, captures);
    }
  }
}

// Call 18 hangs. The first two steps make ten calls, one call agrees about the
// capture, and the first replay makes five. So call 18 is in the second replay.
TEST(NcclGraphsTest, AReplayedStepFailsIfItMakesNoProgressUntilTheTimeout) {
  const FakeNcclFaults faults("1:18:hang");
  const GraphRun run = RunGraphs(true, {.call_timeout = absl::Seconds(2)});
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(run.totals[r].replayed_steps, 2);
    EXPECT_THAT(run.results[r], StatusIs(absl::StatusCode::kUnavailable,
                                         HasSubstr("a captured step")));
  }
}

}  // namespace
}  // namespace kvasir::worker
