// Tests whole steps with GPU kernels on the emulated device. Results must not
// depend on other sequences of the batch, every op must run on the device, and
// kernels must make at most 5 % more memory accesses than recorded.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/device/device_observer.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/op_table/op_table.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using kernels::emulation::AccessCount;
using kernels::emulation::EmulatedDevice;

model::ModelShape Shape() {
  return {.name = "steps-test",
          .num_layers = 1,
          .hidden_size = 128,
          .intermediate_size = 192,
          .num_query_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 64,
          .vocab_size = 517,
          .max_position = 256};
}

// A rank on the emulated device and the sequences that it runs. If memory
// accesses are counted, the rank is not deterministic.
class Steps {
 public:
  using Logits = std::map<std::pair<uint64_t, int64_t>, std::vector<float>>;

  explicit Steps(const std::string& plan_name, bool count_accesses = false) {
    RankOptions options;
    options.page_tokens = 16;
    options.kv_cache_bytes = 2 << 20;
    options.deterministic = !count_accesses;
    options.executor.max_model_len = 128;
    options.executor.max_num_seqs = 4;
    options.executor.max_batched_tokens = 64;
    options.executor.logits_tap = [this](const LogitsRow& row) {
      logits_[{row.sequence_id, row.position}].assign(row.logits.begin(),
                                                      row.logits.end());
    };
    options.make_device = [this, count_accesses](base::ThreadPool*,
                                                 kernels::CpuBackend, int64_t) {
      kernels::emulation::EmulatedDeviceOptions device;
      device.emulator.count_accesses = count_accesses;
      auto made =
          std::make_unique<EmulatedDevice>(device, kernels::emulated::Ops());
      device_ = made.get();
      return made;
    };
    const auto spec = model::SpecOfShape(Shape());
    KVASIR_EXPECT_OK(spec);
    const auto plan =
        plan::MakePresetPlan(plan_name, model::AttentionShapeOf(*spec));
    KVASIR_EXPECT_OK(plan);
    const auto source = RandomSource::Create(
        Shape(), *spec, Resolved(*plan, *spec), 20261, kernels::DType::kBf16);
    KVASIR_EXPECT_OK(source);
    auto rank = Rank::Create(*spec, *plan, source->get(), options);
    KVASIR_EXPECT_OK(rank);
    rank_ = *std::move(rank);
    runner_ = std::make_unique<DirectRunner>(&rank_->executor(),
                                             &rank_->layout(), rank_->pages());
  }

  void Run(absl::Span<const DirectStep> steps) {
    KVASIR_EXPECT_OK(runner_->Run(steps));
  }
  const Logits& logits() const { return logits_; }
  EmulatedDevice& device() { return *device_; }
  bool run_behind() const { return rank_->executor().is_asynchronous(); }

 private:
  Logits logits_;
  EmulatedDevice* device_ = nullptr;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<DirectRunner> runner_;
};

std::vector<int32_t> Ids(int32_t count, int32_t first) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back((first + 97 * i) % 517);
  return ids;
}

DirectStep Prompt(uint64_t sequence, absl::Span<const int32_t> ids) {
  return {.sequence_id = sequence, .token_ids = ids, .sample = GreedySample()};
}
DirectStep Output(uint64_t sequence, const int32_t& id) {
  return {.sequence_id = sequence,
          .token_ids = absl::MakeConstSpan(&id, 1),
          .sample = GreedySample(),
          .output = true};
}

std::vector<std::string> ServedPresets() {
  return {plan::kDensePreset, "dense-8bit", plan::kRotatedPreset,
          "rap-50-4bit",      "palu-50-g2", "svdq-84442200"};
}

TEST(EmulatedStepsTest, LogitsOfASequenceDoNotDependOnOtherSequences) {
  const std::vector<int32_t> prompt = Ids(37, 11);
  const std::vector<int32_t> others[] = {Ids(21, 5), Ids(1, 400), Ids(9, 30)};
  const std::vector<int32_t> output = {3, 516, 77};
  for (const std::string& plan : ServedPresets()) {
    SCOPED_TRACE(plan);
    Steps alone(plan);
    alone.Run({Prompt(1, prompt)});
    for (const int32_t& id : output) alone.Run({Output(1, id)});

    // The prompt runs in three chunks, while other sequences start and end.
    Steps shared(plan);
    const absl::Span<const int32_t> ids(prompt);
    shared.Run({Prompt(7, others[0]), Prompt(1, ids.first(5))});
    shared.Run({Prompt(1, ids.subspan(5, 18)), Output(7, output[1])});
    shared.Run({Prompt(1, ids.subspan(23)), Prompt(8, others[1]),
                Prompt(9, others[2])});
    shared.Run({Output(1, output[0])});
    shared.Run(
        {Output(9, output[2]), Output(1, output[1]), Output(8, output[0])});
    shared.Run({Output(1, output[2]), Output(7, output[0])});
    int rows = 0;
    for (const auto& [place, row] : alone.logits()) {
      const auto found = shared.logits().find(place);
      // Skips positions that have no logits in the shared run.
      if (found == shared.logits().end()) continue;
      ++rows;
      EXPECT_EQ(found->second, row) << "position " << place.second;
    }
    EXPECT_GE(rows, 4);
  }
}

class Launches final : public kernels::DeviceObserver {
 public:
  std::set<std::string> ops;
  int64_t count = 0;
  const void* address = nullptr;  // memory that the launch reads or writes

 private:
  void OnUpload(size_t) override {}
  void OnReadBack(size_t) override {}
  void OnLaunch(const kernels::OpLaunch& launch) override {
    ops.insert(launch.op);
    ++count;
    for (const void* each : launch.addresses) {
      if (each != nullptr) address = each;
    }
  }
  void OnAllocate(size_t) override {}
};

TEST(EmulatedStepsTest, EveryOpRunsOnTheDevice) {
  const kernels::DeviceOps table = kernels::emulated::Ops();
  std::set<std::string> of_device;
  for (size_t i = 0; i < table.count; ++i) of_device.insert(table.ops[i].op);
  const std::vector<int32_t> prompt = Ids(9, 3);
  for (const std::string& plan : ServedPresets()) {
    Steps steps(plan);
    EXPECT_TRUE(steps.run_behind());
    const int64_t before = steps.device().emulator().launches();
    Launches launches;
    {
      const kernels::ObserveDevice observe(&launches);
      steps.Run({Prompt(1, prompt)});
      steps.Run({Output(1, prompt[0])});
    }
    EXPECT_GT(launches.count, 20) << plan;
    for (const std::string& op : launches.ops) {
      EXPECT_TRUE(of_device.contains(op)) << plan << ": " << op;
    }
    // Each of the counted ops launches at least one emulated kernel.
    EXPECT_GE(steps.device().emulator().launches() - before, launches.count);
  }
}

TEST(EmulatedStepsDeathTest, TheProcessEndsIfTheHostReadsDeviceMemoryOfAStep) {
  const std::vector<int32_t> prompt = Ids(9, 3);
  Steps steps(plan::kDensePreset);
  Launches launches;
  {
    const kernels::ObserveDevice observe(&launches);
    steps.Run({Prompt(1, prompt)});
  }
  ASSERT_NE(launches.address, nullptr);
  EXPECT_DEATH(
      {
        const char read = *static_cast<const volatile char*>(launches.address);
        std::exit(read);
      },
      "");
}

// The memory accesses of one kernel under one plan in the steps of Costs(): the
// sectors read and written in global memory, and the passes that shared memory
// needs because of bank conflicts.
struct Cost {
  int64_t sectors = 0, least_sectors = 0;
  int64_t passes = 0, least_passes = 0;
};

std::map<std::string, Cost> Costs() {
  std::map<std::string, Cost> costs;
  for (const std::string& plan : ServedPresets()) {
    Steps steps(plan, /*count_accesses=*/true);
    const std::vector<int32_t> prompts[] = {Ids(50, 11), Ids(7, 5), Ids(3, 1)};
    steps.Run({Prompt(1, prompts[0])});
    steps.Run({Prompt(2, prompts[1]), Prompt(3, prompts[2])});
    const std::vector<int32_t> output = {3, 516, 77};
    steps.Run(
        {Output(1, output[0]), Output(2, output[1]), Output(3, output[2])});
    const auto& emulator = steps.device().emulator();
    for (const std::string& kernel : emulator.Kernels()) {
      Cost& cost = costs[absl::StrCat(plan, ":", kernel)];
      for (const AccessCount& count : emulator.Accesses(kernel)) {
        cost.sectors += count.sectors;
        cost.least_sectors += count.least_sectors;
        cost.passes += count.passes;
        cost.least_passes += count.least_passes;
      }
    }
  }
  return costs;
}

constexpr char kHead[] =
    R"(# Memory accesses of the steps of a small model on the emulated device, by plan and
# kernel: sectors of global memory / the sectors if all accesses were contiguous (fewer
# if several lanes read the same numbers), passes through the banks of shared memory /
# the least possible number of passes.
# worker_emulated_steps_test compares them. With KVASIR_WRITE_ACCESSES=FILE it writes
# them instead.
)";

// Compares the accesses with the committed table. If KVASIR_WRITE_ACCESSES
// names a file, writes a new table there instead and compares nothing.
TEST(EmulatedStepsTest,
     KernelsMakeAtMostFivePercentMoreMemoryAccessesThanRecorded) {
  const std::map<std::string, Cost> costs = Costs();
  if (const char* const path = std::getenv("KVASIR_WRITE_ACCESSES")) {
    std::ofstream file(path);
    file << kHead;
    for (const auto& [name, cost] : costs) {
      file << name << " " << cost.sectors << " " << cost.least_sectors << " "
           << cost.passes << " " << cost.least_passes << "\n";
    }
    ASSERT_TRUE(file.flush());
    return;
  }
  const std::string path = absl::StrCat(std::getenv("KVASIR_SOURCE_DIR"),
                                        "/kernels/simt/accesses.txt");
  const std::string renew =
      absl::StrCat("if the change is intended, run this test with ",
                   "KVASIR_WRITE_ACCESSES=", path, " to write a new table");
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  std::map<std::string, Cost> committed;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    Cost cost;
    ASSERT_TRUE(words >> name >> cost.sectors >> cost.least_sectors >>
                cost.passes >> cost.least_passes)
        << line;
    committed[name] = cost;
  }
  const auto grew = [](int64_t now, int64_t before) {
    return 20 * now > 21 * before;
  };
  for (const auto& [name, cost] : costs) {
    const auto found = committed.find(name);
    if (found == committed.end()) {
      ADD_FAILURE() << name << " is not in the table; " << renew;
      continue;
    }
    EXPECT_FALSE(grew(cost.sectors, found->second.sectors))
        << name << ": sectors: " << cost.sectors << ", in the table "
        << found->second.sectors << "; " << renew;
    EXPECT_FALSE(grew(cost.passes, found->second.passes))
        << name << ": passes: " << cost.passes << ", in the table "
        << found->second.passes << "; " << renew;
  }
  for (const auto& [name, cost] : committed) {
    EXPECT_TRUE(costs.contains(name))
        << name << " is in the table but did not run; " << renew;
  }
}

}  // namespace
}  // namespace kvasir::worker
