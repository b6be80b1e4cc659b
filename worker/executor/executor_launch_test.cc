// Tests the copies to and from the device, the allocations and the launches of
// steps, under every plan and model family.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/device/device_observer.h"
#include "worker/collective/in_process_group.h"
#include "worker/executor/step/step_layout.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/prompt_lift_cases.h"

namespace {

// While not null, points to a counter of this thread's heap allocations.
thread_local int64_t* heap_allocations = nullptr;

void* CountedAllocate(std::size_t bytes, std::size_t alignment) {
  if (heap_allocations != nullptr) ++*heap_allocations;
  const std::size_t whole = (bytes + alignment) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return CountedAllocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return CountedAllocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kvasir::v1::SampleRequest;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;
using ::testing::HasSubstr;

struct StepRecord {
  StepBucket bucket;
  StepSizes sizes;  // `histories` and `top` are not filled in
  int page_copies = 0;
  int uploads = 0;
  int read_backs = 0;
  int others = 0;  // uploads outside of Enqueue, and read-backs within it
  int64_t device_allocations = 0;
  std::array<int64_t, kNumStepParts> heap = {};
  std::vector<kernels::OpLaunch> launches;

  // Returns one line for each launch, with its number of rows if `with_rows`.
  // Steps of different sizes in one bucket have different numbers of rows.
  std::string Text(bool with_rows) const {
    std::string lines;
    for (const kernels::OpLaunch& launch : launches) {
      absl::StrAppend(&lines, launch.op, " ", launch.width, " ",
                      with_rows ? launch.rows : 0);
      for (const void* const address : launch.addresses) {
        absl::StrAppend(&lines, " ",
                        absl::Hex(reinterpret_cast<uintptr_t>(address)));
      }
      absl::StrAppend(&lines, "\n");
    }
    return lines;
  }
  int64_t NumLaunches(std::string_view op) const {
    return std::count_if(
        launches.begin(), launches.end(),
        [op](const kernels::OpLaunch& launch) { return launch.op == op; });
  }
};

// An executor that passes steps on to a rank's executor and records what each
// step copies, allocates and launches.
class RecordedExecutor final : public Executor,
                               public StepProfile,
                               private kernels::DeviceObserver {
 public:
  void set_executor(ModelExecutor* executor) { executor_ = executor; }
  // Adds a page copy to the next step.
  void AddPageCopy(uint32_t page_group, int32_t from, int32_t to) {
    kvasir::v1::PageCopy& copy = page_copies_.emplace_back();
    copy.set_page_group(page_group);
    copy.set_from_page(from);
    copy.set_to_page(to);
  }
  const std::vector<StepRecord>& steps() const { return steps_; }

  absl::Status Enqueue(const StepPlan& given) override {
    StepPlan plan = given;
    plan.mutable_page_copies()->Add(page_copies_.begin(), page_copies_.end());
    page_copies_.clear();
    StepRecord& step = steps_.emplace_back();
    step.page_copies = plan.page_copies_size();
    step.launches.reserve(1 << 12);
    for (const kvasir::v1::SequenceStep& sequence : plan.sequences()) {
      ++step.sizes.sequences;
      step.sizes.tokens += sequence.num_tokens();
      step.sizes.samples += sequence.has_sample() ? 1 : 0;
      step.sizes.targets += sequence.target_ids_size();
    }
    in_enqueue_ = true;
    absl::Status status;
    {
      const kernels::ObserveDevice observe(this);
      status = executor_->Enqueue(plan);
      heap_allocations = nullptr;
    }
    in_enqueue_ = false;
    step.bucket = executor_->bucket();
    return status;
  }

  absl::StatusOr<StepResult> Await() override {
    const kernels::ObserveDevice observe(this);
    return executor_->Await();
  }

  StepPart Enter(kernels::Stream&, StepPart part) override {
    const StepPart before = part_;
    part_ = part;
    if (heap_allocations != nullptr) CountHeap();
    return before;
  }

 private:
  bool launching() const { return in_enqueue_ && steps_.back().uploads > 0; }
  void CountHeap() {
    heap_allocations = &steps_.back().heap[static_cast<size_t>(part_)];
  }
  void OnUpload(size_t) override {
    ++(in_enqueue_ ? steps_.back().uploads : steps_.back().others);
    CountHeap();
  }
  void OnReadBack(size_t) override {
    ++(in_enqueue_ ? steps_.back().others : steps_.back().read_backs);
  }
  void OnLaunch(const kernels::OpLaunch& launch) override {
    steps_.back().launches.push_back(launch);
  }
  void OnAllocate(size_t) override {
    if (launching()) ++steps_.back().device_allocations;
  }

  ModelExecutor* executor_ = nullptr;
  std::vector<StepRecord> steps_;
  std::vector<kvasir::v1::PageCopy> page_copies_;
  StepPart part_ = StepPart::kRest;
  bool in_enqueue_ = false;
};

std::vector<int32_t> Ids(int32_t first, int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back((first + 37 * i) % 1237);
  return ids;
}

// A request for a sample with log probabilities, penalties, a mask, banned ids
// and biases.
SampleRequest DemandingSample(const std::vector<int32_t>& history) {
  SampleRequest sample = GreedySample();
  sample.set_temperature(0.7f);
  sample.set_num_logprobs(3);
  sample.set_presence_penalty(0.5f);
  sample.set_token_mask("all");
  sample.add_banned_ids(history.front());
  sample.add_logit_bias()->set_token_id(history.back());
  sample.set_history_reset(true);
  sample.mutable_prompt_history()->Add(history.begin(), history.end());
  return sample;
}

std::vector<FamilyCase> EveryPlan() {
  std::vector<FamilyCase> cases = FamilyCases(24);
  for (const PlanCase& each : PlanCases()) cases.push_back({TinyShape(), each});
  for (FamilyCase& each : PromptLiftCases()) {
    each.plan_case.name += "Lifted";
    cases.push_back(std::move(each));
  }
  return cases;
}

class ExecutorLaunchTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    RankOptions options = TinyOptions();
    options.executor.profile = &executor_;
    KVASIR_ASSERT_OK_AND_ASSIGN(
        rank_, MakePlannedRank(GetParam().plan_case, options, nullptr, "BF16",
                               GetParam().shape));
    executor_.set_executor(&rank_->executor());
    const std::vector<uint32_t> all(1237 / 32 + 1, ~uint32_t{0});
    KVASIR_ASSERT_OK(rank_->executor().RegisterTokenMask("all", all));
    runner_ = std::make_unique<DirectRunner>(&executor_, &rank_->layout(),
                                             rank_->pages());
  }

  void Run(const std::vector<DirectStep>& steps) {
    KVASIR_ASSERT_OK(runner_->Run(steps).status());
  }

  // Adds page copies in every page group. In each group, the last copy reads a
  // page that another copy writes, so it needs a second batch. All others read
  // page 0. No sequence uses these pages.
  void AddPageCopies(int more) {
    for (uint32_t group = 0; group < rank_->pages().size(); ++group) {
      for (int32_t i = 0; i < 3 + more; ++i) {
        executor_.AddPageCopy(group, 0, 1 + i);
      }
      executor_.AddPageCopy(group, 1, 5);
    }
  }

  // Runs one step of each kind. There are prompts with samples, decodes, both
  // in one step, and a prompt chunk without a sample. There are also scored
  // targets, and page copies with and without tokens. Sequence ids begin at
  // `first`. If `more` is 1, steps have more sequences and tokens, but the same
  // padded sizes.
  void RunAll(uint64_t first, int more) {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<DirectStep> prefill;
    std::vector<DirectStep> decode;
    for (int i = 0; i < 5 + more; ++i) {
      prompts.push_back(Ids(static_cast<int32_t>(first) + i, 4 + i % 2));
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      prefill.push_back(
          {.sequence_id = first + i,
           .token_ids = prompts[i],
           .sample = i < 2 ? DemandingSample(prompts[i]) : GreedySample()});
      decode.push_back({.sequence_id = first + i, .sample = GreedySample()});
    }
    AddPageCopies(more);
    Run(prefill);
    Run(decode);
    Run(decode);
    const std::vector<int32_t> late =
        Ids(static_cast<int32_t>(first), 20 + more);
    const DirectStep chunk = {.sequence_id = first + 50, .token_ids = late};
    std::vector<DirectStep> mixed = decode;
    for (int i = 0; i < more; ++i) {
      mixed.insert(mixed.begin(),
                   {.sequence_id = first + 60,
                    .token_ids = absl::MakeConstSpan(late).first(3)});
    }
    mixed.insert(mixed.begin(), chunk);
    Run(mixed);
    mixed.front() = {.sequence_id = first + 51, .token_ids = late};
    Run(mixed);
    Run({chunk});
    Run({{.sequence_id = first + 50, .token_ids = late, .target_ids = late}});
    for (size_t i = 0; i < prompts.size(); ++i) runner_->Release(first + i);
    for (const int other : {50, 51, 60}) {
      runner_->Release(first + static_cast<uint64_t>(other));
    }
    AddPageCopies(more);
    Run({});
  }

  RecordedExecutor executor_;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<DirectRunner> runner_;
};

TEST_P(ExecutorLaunchTest,
       AStepMakesOneUploadAndOneReadBackAndAllocatesNothing) {
  RunAll(100, 0);
  RunAll(200, 1);
  ASSERT_EQ(executor_.steps().size(), 16u);
  const auto num_layers = static_cast<int64_t>(rank_->layout().layers().size());
  int with_copies = 0;
  for (const StepRecord& step : executor_.steps()) {
    const bool computes = step.sizes.tokens > 0;
    EXPECT_EQ(step.uploads, 1);
    EXPECT_EQ(step.read_backs, computes ? 1 : 0);
    EXPECT_EQ(step.others, 0);
    EXPECT_EQ(step.device_allocations, 0);
    const int64_t copies = step.NumLaunches("copy_pages");
    // AddPageCopies makes two batches of copies, launched once per layer.
    EXPECT_EQ(copies, step.page_copies > 0 ? 2 * num_layers : 0);
    with_copies += copies > 0 ? 1 : 0;
    EXPECT_GT(static_cast<int64_t>(step.launches.size()) - copies,
              computes ? 10 : -1);
    // a single rank makes no collective calls
    EXPECT_EQ(step.NumLaunches("all_reduce_sum"), 0);
    EXPECT_EQ(step.NumLaunches("all_gather"), 0);
    for (size_t part = 0; part < kNumStepParts; ++part) {
      EXPECT_EQ(step.heap[part], 0)
          << StepPartName(static_cast<StepPart>(part));
    }
  }
  EXPECT_EQ(with_copies, 4);
}

TEST_P(ExecutorLaunchTest, StepsOfTheSameBucketMakeTheSameLaunches) {
  RunAll(100, 0);
  RunAll(200, 1);  // same padded sizes, different true sizes
  RunAll(300, 0);  // same sizes, different sequences
  const std::vector<StepRecord>& steps = executor_.steps();
  int alike = 0;
  int as_large = 0;
  for (size_t a = 0; a < steps.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (!(steps[a].bucket == steps[b].bucket)) continue;
      ++alike;
      const bool same_sizes = steps[a].sizes == steps[b].sizes;
      as_large += same_sizes ? 1 : 0;
      ASSERT_EQ(steps[a].Text(same_sizes), steps[b].Text(same_sizes))
          << "steps " << a << ", " << b;
    }
  }
  EXPECT_EQ(as_large, 20);
  EXPECT_EQ(alike - as_large, 22);
}

TEST_P(ExecutorLaunchTest, TheBucketOfAStepDependsOnItsBatchesOfPageCopies) {
  const auto run = [this](int copies, bool chained) {
    for (int32_t i = 0; i < copies; ++i) executor_.AddPageCopy(0, 0, 1 + i);
    if (chained) executor_.AddPageCopy(0, 1, 5);
    Run({});
    return executor_.steps().back().bucket;
  };
  const StepBucket three = run(3, false);
  EXPECT_TRUE(three == run(4, false));
  EXPECT_FALSE(three == run(2, false));
  EXPECT_FALSE(three == run(3, true));
  EXPECT_FALSE(three == run(0, false));
  EXPECT_EQ(executor_.steps().back().uploads, 0);
  EXPECT_TRUE(executor_.steps().back().launches.empty());
}

INSTANTIATE_TEST_SUITE_P(Plans, ExecutorLaunchTest,
                         ::testing::ValuesIn(EveryPlan()),
                         [](const auto& parameter) {
                           return parameter.param.plan_case.name;
                         });

// Runs three sequences with each eviction rule: keep the slots with the best
// scores, or the latest slots. In some steps several sequences evict, in others
// only one.
TEST(ExecutorEvictionLaunchTest,
     EvictionsLaunchTwoOpsPerLayerAndAllocateNothing) {
  for (const char* others : {"", R"(,"others":"LATEST")"}) {
    const PlanCase plan_case = {
        .name = "Evicts",
        .key = plan_cases::Full("POST_ROPE"),
        .value = plan_cases::Full("NO_ROPE"),
        .first_whole = true,
        .eviction = absl::StrCat(
            R"({"budget":9,"sinks":2,"recent":4,"every_tokens":6,"lambda":1,)"
            R"("positions":"ORIGINAL")",
            others, "}")};
    RecordedExecutor executor;
    RankOptions options = TinyOptions();
    options.executor.profile = &executor;
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                MakePlannedRank(plan_case, options));
    executor.set_executor(&rank->executor());
    DirectRunner runner(&executor, &rank->layout(), rank->pages());
    std::vector<std::vector<int32_t>> prompts;
    for (int i = 0; i < 3; ++i) prompts.push_back(Ids(i, 11 + i / 2));
    std::vector<int> evictions;  // by step: how many sequences evict
    for (int turn = 0; turn < 3 + 14; ++turn) {
      std::vector<DirectStep> steps;
      evictions.push_back(0);
      for (uint64_t id = 1; id <= prompts.size(); ++id) {
        const absl::Span<const int32_t> prompt = prompts[id - 1];
        const int64_t done = runner.length(id);
        const auto at = static_cast<size_t>(done);
        DirectStep step = {.sequence_id = id, .sample = GreedySample()};
        if (turn < 3) {
          // Each of the first three steps runs one whole prompt.
          if (static_cast<uint64_t>(turn) + 1 != id) continue;
          step.token_ids = prompt;
        } else if (at >= prompt.size() && done > 9 &&
                   (done % 6 == 0 || at == prompt.size())) {
          ++evictions.back();
        }
        steps.push_back(step);
      }
      KVASIR_ASSERT_OK(runner.Run(steps).status());
    }
    const std::vector<StepRecord>& steps = executor.steps();
    ASSERT_EQ(steps.size(), evictions.size());
    int together = 0;
    int alike = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].uploads, 1);
      EXPECT_EQ(steps[i].read_backs, 1);
      EXPECT_EQ(steps[i].others, 0);
      EXPECT_EQ(steps[i].device_allocations, 0);
      for (size_t part = 0; part < kNumStepParts; ++part) {
        EXPECT_EQ(steps[i].heap[part], 0)
            << StepPartName(static_cast<StepPart>(part));
      }
      // Only one of the two layers evicts. One launch of each op covers all
      // sequences.
      const int64_t launches = evictions[i] > 0 ? 1 : 0;
      EXPECT_EQ(steps[i].NumLaunches("evict_select"), launches) << i;
      EXPECT_EQ(steps[i].NumLaunches("evict_compact"), launches) << i;
      together += evictions[i] > 1 ? 1 : 0;
      for (size_t j = 0; j < i; ++j) {
        if (!(steps[i].bucket == steps[j].bucket)) continue;
        alike += evictions[i] > 0 ? 1 : 0;
        const bool same_sizes =
            steps[i].sizes == steps[j].sizes && evictions[i] == evictions[j];
        EXPECT_EQ(steps[i].Text(same_sizes), steps[j].Text(same_sizes))
            << "steps " << i << ", " << j;
      }
    }
    EXPECT_GT(together, 0);
    EXPECT_GT(alike, 0);
  }
}

// Each layer calls AllReduceSum after attention and after the MLP. Each step
// also calls it for embedding rows and for the marks of tokens whose latents
// are not finite, and calls AllGather for the logits.
TEST(ExecutorRanksTest,
     AStepOfNLayersCallsAllReduceTwoNPlusTwoTimesAndAllGatherOnce) {
  const auto group = InProcessGroup::Create(2);
  std::vector<RecordedExecutor> executors(group.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.size(); ++r) {
    threads.emplace_back([&executor = executors[r], own = group[r].get()] {
      RankOptions options = TinyOptions();
      options.executor.profile = &executor;
      KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank, MakeTinyRank(options, own));
      executor.set_executor(&rank->executor());
      DirectRunner runner(&executor, &rank->layout(), rank->pages());
      const std::vector<int32_t> prompt = Ids(7, 20);
      DirectStep step = {
          .sequence_id = 1, .token_ids = prompt, .sample = GreedySample()};
      KVASIR_ASSERT_OK(runner.Run({step}).status());
      step.token_ids = {};
      KVASIR_ASSERT_OK(runner.Run({step}).status());
      KVASIR_ASSERT_OK(runner.Run({step}).status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const RecordedExecutor& executor : executors) {
    const std::vector<StepRecord>& steps = executor.steps();
    ASSERT_EQ(steps.size(), 3u);
    for (const StepRecord& step : steps) {
      EXPECT_EQ(step.NumLaunches("all_reduce_sum"), 2 * 2 + 2);
      EXPECT_EQ(step.NumLaunches("all_gather"), 1);
    }
    // both steps decode one token
    EXPECT_EQ(steps[1].Text(true), steps[2].Text(true));
  }
}

TEST(ExecutorTurnsTest, TheExecutorRefusesASecondStepWhileAStepIsInFlight) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank, MakeTinyRank(TinyOptions()));
  ModelExecutor& executor = rank->executor();
  EXPECT_THAT(executor.Await(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                         HasSubstr("no step is in flight")));
  StepPlan nothing;
  nothing.set_step_id(1);
  KVASIR_ASSERT_OK(executor.Enqueue(nothing));
  StepPlan next;
  next.set_step_id(2);
  EXPECT_THAT(executor.Enqueue(next),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("a step is in flight")));
  // The two refused calls above changed nothing.
  KVASIR_EXPECT_OK(executor.Await());
  KVASIR_EXPECT_OK(executor.Execute(next));
}

TEST(PadSizesTest, CountsArePaddedToPowersOfTwoWithinTheLimits) {
  const StepLimits limits = {.max_batched_tokens = 100,
                             .max_sequences = 50,
                             .vocab_size = 1000,
                             .max_logprobs = 20};
  const auto samples = [&](int64_t count, int64_t logits_rows) {
    return PadSizes({.samples = count}, limits, logits_rows).samples;
  };
  EXPECT_EQ(PadSizes({}, limits, 8), StepSizes());
  EXPECT_EQ(PadSizes({.tokens = 33}, limits, 8).tokens, 64);
  EXPECT_EQ(PadSizes({.tokens = 65}, limits, 8).tokens, 100);
  EXPECT_EQ(samples(5, 16), 8);
  EXPECT_EQ(samples(9, 12), 12);
  // If samples need several chunks of logits, padding fills only the last
  // chunk. An additional chunk would read the head's weights once more.
  EXPECT_EQ(samples(13, 12), 24);
  EXPECT_EQ(samples(49, 12), 50);
  EXPECT_EQ(samples(3, 1), 3);
}

TEST(StepBlobTest, TheBlobKeepsItsAddressUntilALargerStepMakesItGrow) {
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  const auto stream = device.MakeStream();
  StepBlob blob(&device.allocator());
  const auto pack = [&](const std::vector<int32_t>& numbers) {
    const int32_t* place = nullptr;
    const auto count =
        std::max<int64_t>(20, static_cast<int64_t>(numbers.size()));
    for (const bool counting : {true, false}) {
      if (counting) {
        blob.StartCounting();
      } else {
        KVASIR_EXPECT_OK(blob.StartPacking());
      }
      // Takes one byte, to check that the next array is still aligned.
      blob.Take<char>(1);
      place = blob.Add(absl::MakeConstSpan(numbers), count, int32_t{-1})
                  .device_address();
    }
    KVASIR_EXPECT_OK(blob.Upload(*stream));
    return place;
  };
  const int32_t* const first = pack({1, 2, 3});
  EXPECT_EQ(std::vector<int32_t>(first, first + 5),
            (std::vector<int32_t>{1, 2, 3, -1, -1}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(pack({4}), first);
  EXPECT_EQ(first[0], 4);
  const int64_t bytes = device.allocator().total_use().bytes;
  const int32_t* const grown = pack(std::vector<int32_t>(1000, 7));
  EXPECT_EQ(grown[999], 7);
  EXPECT_GT(device.allocator().total_use().bytes, bytes);
}

}  // namespace
}  // namespace kvasir::worker
