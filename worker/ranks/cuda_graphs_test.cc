// Tests steps that run as CUDA graphs. Steps with the same graph key must make
// the same launches, and a failed capture must not change results. Uses a fake
// CUDA runtime, which runs kernels on an emulator instead of a GPU.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_cublaslt.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/emulation/emulator.h"
#include "kernels/op_table/op_table.h"
#include "kernels/rowwise/norm.h"
#include "plan/presets.h"
#include "worker/executor/graphs/step_graphs.h"
#include "worker/executor/model_executor.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/graph_steps.h"

namespace kvasir::worker {
namespace {

using kernels::Gemm;
using kernels::cuda::FakeCublasLt;
using kernels::cuda::FakeLaunch;
using kernels::cuda::FakeRuntime;
using kernels::cuda::Result;

// The kernel launches of one step, and its graph key.
struct Launched {
  StepSizes key;
  std::vector<FakeLaunch> kernels;
  std::vector<Gemm> gemms;
};

// Test fixture: a rank on a fake GPU that records all calls.
class CudaGraphsTest : public ::testing::Test {
 protected:
  CudaGraphsTest() {
    runtime_.OnRun(
        [this](const kernels::KernelLaunch& launch) { emulator_.Run(launch); });
  }

  void Make(const std::string& plan, bool graphs, bool deterministic,
            int64_t max_model_len = 64) {
    auto rank = MakeGraphRank(
        {.plan = plan,
         .graphs = graphs,
         .deterministic = deterministic,
         .max_model_len = max_model_len,
         .make_device = [&]() -> std::unique_ptr<kernels::Device> {
           auto device = kernels::CudaDevice::Make(
               {.deterministic = deterministic}, &runtime_,
               kernels::emulated::Ops(), [this] {
                 return absl::StatusOr<kernels::cuda::CublasLt*>(&library_);
               });
           KVASIR_EXPECT_OK(device);
           return *std::move(device);
         }});
    KVASIR_ASSERT_OK(rank);
    rank_ = *std::move(rank);
  }
  std::vector<std::string> RunSteps(const std::function<void()>& after_step,
                                    size_t most_steps = kAllGraphSteps) {
    auto results = RunGraphSteps(*rank_, after_step, most_steps);
    KVASIR_EXPECT_OK(results);
    return results.ok() ? *results : std::vector<std::string>();
  }
  const ExecutorTotals& totals() { return rank_->executor().totals(); }
  // Returns everything that was launched since the last call of TakeLaunched,
  // as one step.
  Launched TakeLaunched() {
    const std::vector<FakeLaunch> kernels = runtime_.launches();
    const std::vector<Gemm> gemms = library_.gemms();
    Launched step;
    step.key = StepGraphs::KeyOf(rank_->executor().sizes(),
                                 rank_->executor().bucket());
    step.kernels.assign(kernels.begin() + kernels_taken_, kernels.end());
    step.gemms.assign(gemms.begin() + gemms_taken_, gemms.end());
    kernels_taken_ = static_cast<std::ptrdiff_t>(kernels.size());
    gemms_taken_ = static_cast<std::ptrdiff_t>(gemms.size());
    return step;
  }

  FakeRuntime runtime_;
  FakeCublasLt library_{&runtime_};
  kernels::emulation::Emulator emulator_{{}};
  std::unique_ptr<Rank> rank_;
  std::ptrdiff_t kernels_taken_ = 0;
  std::ptrdiff_t gemms_taken_ = 0;
};

// Whether this byte of the launch's parameters is padding, whose value is
// undefined.
bool IsPadding(const FakeLaunch& launch, size_t byte) {
  using kernels::NormArgs;
  return launch.launch.name == std::string("norm") &&
         launch.args.size() == sizeof(NormArgs) &&
         byte >= offsetof(NormArgs, dtype) + sizeof(NormArgs::dtype);
}

// Compares two kernel launches in everything that a graph stores about a
// launch, and describes the first difference. Empty if there is none.
std::string Difference(const FakeLaunch& a, const FakeLaunch& b) {
  const auto parts = [](const kernels::KernelLaunch& launch) {
    return std::tuple(std::string(launch.name), launch.function, launch.grid_x,
                      launch.grid_y, launch.threads, launch.shared_bytes,
                      launch.ctas_together);
  };
  if (parts(a.launch) != parts(b.launch) || a.args.size() != b.args.size()) {
    return absl::StrCat(a.launch.name, " beside ", b.launch.name);
  }
  for (size_t i = 0; i < a.args.size(); ++i) {
    if (a.args[i] == b.args[i] || IsPadding(a, i)) continue;
    return absl::StrCat(a.launch.name, ": byte ", i, " of its parameters");
  }
  return "";
}
std::string Difference(const Gemm& a, const Gemm& b) {
  const auto parts = [](const Gemm& gemm) {
    return std::tuple(gemm.x, gemm.x_row_stride, gemm.weight, gemm.bias, gemm.y,
                      gemm.y_row_stride, gemm.rows, gemm.n, gemm.k, gemm.dtype,
                      gemm.y_dtype, gemm.workspace);
  };
  return parts(a) == parts(b) ? "" : "a product";
}
std::string Difference(const Launched& a, const Launched& b) {
  if (a.kernels.size() != b.kernels.size() ||
      a.gemms.size() != b.gemms.size()) {
    return "numbers of launches";
  }
  for (size_t i = 0; i < a.kernels.size(); ++i) {
    const std::string found = Difference(a.kernels[i], b.kernels[i]);
    if (!found.empty()) return absl::StrCat(i, ", ", found);
  }
  for (size_t i = 0; i < a.gemms.size(); ++i) {
    const std::string found = Difference(a.gemms[i], b.gemms[i]);
    if (!found.empty()) return absl::StrCat(i, ", ", found);
  }
  return "";
}

class CudaGraphsOfPlanTest : public CudaGraphsTest,
                             public ::testing::WithParamInterface<std::string> {
};

// A graph replays the launches of an earlier step with the same key. So without
// graphs, two steps with the same key must make launches that are equal to the
// byte.
TEST_P(CudaGraphsOfPlanTest, StepsWithTheSameGraphKeyMakeIdenticalLaunches) {
  Make(GetParam(), /*graphs=*/false, /*deterministic=*/false);
  TakeLaunched();
  std::vector<Launched> steps;
  RunSteps([&] { steps.push_back(TakeLaunched()); });
  // The indices of the steps to compare, which have no prompt and no page copy.
  // The last steps are left out, because the upload buffer moves to another
  // address before them.
  const std::vector<size_t> decodes = {1,  2,  3,  4,  6,  7, 9,
                                       10, 11, 12, 14, 15, 16};
  ASSERT_GT(steps.size(), decodes.back());
  int alike = 0;
  for (const size_t a : decodes) {
    for (const size_t b : decodes) {
      if (b >= a) continue;
      const std::string found = Difference(steps[a], steps[b]);
      if (steps[a].key == steps[b].key) {
        ++alike;
        EXPECT_EQ(found, "") << "steps " << a << " and " << b;
      } else {
        EXPECT_NE(found, "") << "steps " << a << " and " << b;
      }
    }
  }
  EXPECT_GT(steps[1].kernels.size(), 10u);
  EXPECT_GT(steps[1].gemms.size(), 3u);
  // The number of pairs of steps with the same key. Six steps have two
  // sequences, three have three sequences, two have four sequences, and two
  // have other sampling settings.
  EXPECT_EQ(alike, 6 * 5 / 2 + 3 + 1 + 1);
}

TEST_P(CudaGraphsOfPlanTest, DecodesWithAnyContextLengthMakeIdenticalLaunches) {
  Make(GetParam(), /*graphs=*/false, /*deterministic=*/true,
       /*max_model_len=*/900);
  DirectRunner runner(&rank_->executor(), &rank_->layout(), rank_->pages());
  // StartAt begins a sequence at a later position, so the slots before that
  // position are never computed. Fill them with zeros.
  const KvArenas& arenas = rank_->executor().arenas();
  std::memset(
      const_cast<char*>(static_cast<const char*>(
          arenas.layers()[0].key[0].latents.arena.device_address())),
      0, static_cast<size_t>(arenas.page_bytes(0) * arenas.num_pages()[0]));
  const int32_t id = 5;
  std::vector<Launched> steps;
  TakeLaunched();
  uint64_t sequence = 0;
  // Lengths of contexts. The short ones lie in one page, the longest ones need
  // several blocks and splits of the attention kernel.
  for (const int64_t length : {3, 15, 130, 600, 850}) {
    runner.StartAt(++sequence, length);
    KVASIR_ASSERT_OK(runner.Run({{.sequence_id = sequence,
                                  .token_ids = absl::MakeConstSpan(&id, 1),
                                  .sample = GreedySample(),
                                  .output = true}}));
    runner.Release(sequence);
    steps.push_back(TakeLaunched());
    EXPECT_EQ(Difference(steps.front(), steps.back()), "") << length;
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, CudaGraphsOfPlanTest,
                         ::testing::Values(plan::kDensePreset,
                                           plan::kRotatedPreset, "rap-50-4bit"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST_F(CudaGraphsTest, AReplayedStepIsASingleGraphLaunch) {
  Make(plan::kDensePreset, /*graphs=*/true, /*deterministic=*/false);
  std::vector<size_t> launches;
  RunSteps([&] { launches.push_back(runtime_.launches().size()); });
  EXPECT_EQ(totals().captured_steps, kGraphCaptures);
  EXPECT_EQ(totals().replayed_steps, kGraphReplays);
  EXPECT_EQ(runtime_.calls("LaunchGraph"), kGraphReplays);
  EXPECT_EQ(runtime_.calls("InstantiateGraph"), kGraphCaptures);
  // The third step with two sequences is the first that is replayed. It
  // launches a graph but no kernel.
  EXPECT_GT(launches[2], launches[1]);
  EXPECT_EQ(launches[3], launches[2]);
}

// In each round one CUDA call fails. The step then runs without a graph, so no
// request fails and the tokens stay the same.
TEST_F(CudaGraphsTest, StepsGiveTheSameResultsAfterAFailedCapture) {
  Make(plan::kDensePreset, /*graphs=*/false, /*deterministic=*/true);
  const std::vector<std::string> want = RunSteps(nullptr, kFewGraphSteps);
  struct Failure {
    const char* call;
    bool kernel;           // whether `call` launches a kernel
    int64_t captures = 0;  // how many captures succeed before the failure
  };
  for (const Failure& failure :
       {Failure{"BeginCapture", false}, Failure{"Launch", true},
        Failure{"EndCapture", false}, Failure{"InstantiateGraph", false},
        Failure{"LaunchGraph", false, 1}}) {
    SCOPED_TRACE(failure.call);
    rank_ = nullptr;
    Make(plan::kDensePreset, /*graphs=*/true, /*deterministic=*/true);
    if (!failure.kernel) {
      runtime_.FailNext(failure.call, Result::kCaptureUnsupported);
    }
    int step = 0;
    const int64_t graphs = runtime_.calls("LaunchGraph");
    const std::vector<std::string> have = RunSteps(
        [&] {
          // The next step is captured; its first kernel launch fails.
          if (++step == 2 && failure.kernel) {
            runtime_.FailNext("Launch", Result::kCaptureUnsupported);
          }
        },
        kFewGraphSteps);
    EXPECT_EQ(have, want);
    EXPECT_EQ(totals().captured_steps, failure.captures);
    EXPECT_EQ(totals().replayed_steps, 0);
    EXPECT_LE(runtime_.calls("LaunchGraph"), graphs + 1);
  }
}

}  // namespace
}  // namespace kvasir::worker
