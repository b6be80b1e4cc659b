// Tests which part of a model each rank of a group reads and holds in memory,
// and what the ranks agree on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/random_weights.h"
#include "model/shapes/shape_config.h"
#include "model/shapes/shapes.h"
#include "plan/plan.h"
#include "plan/presets.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/saved_checkpoint.h"
#include "worker/testing/thread_agreement.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

// The shape of a model with one layer, whose tensors have many tiles in both
// directions, as in large models.
model::ModelShape WideShape() {
  return {.name = "wide-test",
          .num_layers = 1,
          .hidden_size = 1024,
          .intermediate_size = 4096,
          .num_query_heads = 16,
          .num_kv_heads = 8,
          .head_dim = 64,
          .vocab_size = 4096,
          .max_position = 128};
}

// One rank of a group, with the checkpoint that it loads.
struct LoadedRank {
  std::unique_ptr<model::Checkpoint> checkpoint;
  std::unique_ptr<CheckpointSource> source;
  absl::StatusOr<std::unique_ptr<Rank>> rank = absl::UnknownError("none");
};

struct Group {
  explicit Group(int64_t size)
      : agreement(size),
        collectives(InProcessGroup::Create(size)),
        ranks(static_cast<size_t>(size)) {}

  ThreadAgreement agreement;
  std::vector<std::unique_ptr<Collective>> collectives;
  std::vector<LoadedRank> ranks;
};

// Loads a group of ranks at the same time; rank r reads folders[r]. If `pages`
// is empty, each pool has 8 MiB.
std::unique_ptr<Group> LoadGroup(const std::vector<std::string>& folders,
                                 const kvasir::v1::KvPlan& plan,
                                 const cache::PageCounts& pages = {}) {
  auto group = std::make_unique<Group>(static_cast<int64_t>(folders.size()));
  std::vector<std::thread> threads;
  for (size_t r = 0; r < folders.size(); ++r) {
    threads.emplace_back([&, r] {
      LoadedRank& loaded = group->ranks[r];
      auto checkpoint = model::Checkpoint::Open(folders[r]);
      KVASIR_ASSERT_OK(checkpoint);
      loaded.checkpoint =
          std::make_unique<model::Checkpoint>(*std::move(checkpoint));
      loaded.source =
          std::make_unique<CheckpointSource>(loaded.checkpoint.get());
      RankOptions options = TinyOptions();
      options.kv_cache_bytes = 8 << 20;
      options.pages = pages;
      options.agree = group->agreement.Of(static_cast<int64_t>(r));
      loaded.rank =
          Rank::Create(loaded.checkpoint->spec(), plan, loaded.source.get(),
                       options, group->collectives[r].get());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return group;
}

kvasir::v1::KvPlan WholePlan(const model::ModelShape& shape) {
  return plan::FullRankPlan(model::AttentionShapeOf(*model::SpecOfShape(shape)),
                            kvasir::v1::F32);
}

double ShareOf(int64_t part, int64_t all) {
  return static_cast<double>(part) / static_cast<double>(all);
}

TEST(GroupMemoryTest, ARankReadsOnlyItsPartOfTheCheckpoint) {
  const SavedCheckpoint saved(WideShape(), kernels::DType::kBf16);
  const auto plan = WholePlan(WideShape());
  const auto one = LoadGroup({saved.folder()}, plan);
  KVASIR_ASSERT_OK(one->ranks[0].rank);
  const int64_t all = one->ranks[0].source->read_bytes();
  EXPECT_EQ(all, 2 * model::CountParameters(WideShape()));
  for (const int64_t size : {2, 4, 8}) {
    const auto group = LoadGroup(
        std::vector<std::string>(static_cast<size_t>(size), saved.folder()),
        plan);
    int64_t sum = 0;
    for (const LoadedRank& loaded : group->ranks) {
      KVASIR_ASSERT_OK(loaded.rank);
      const int64_t bytes = loaded.source->read_bytes();
      EXPECT_EQ((*loaded.rank)->read_bytes(), bytes);
      EXPECT_LE(
          static_cast<double>(bytes),
          static_cast<double>(all) * (1.0 / static_cast<double>(size) + 0.05))
          << size << " ranks";
      sum += bytes;
      // The group has the same ids as a single rank.
      EXPECT_EQ((*loaded.rank)->weights_id(),
                (*one->ranks[0].rank)->weights_id());
      EXPECT_EQ((*loaded.rank)->cache_id(), (*one->ranks[0].rank)->cache_id());
    }
    EXPECT_GE(sum, all);
  }
}

// Returns the tokens that each rank samples after a prompt.
std::vector<std::vector<int32_t>> Answers(const Group& group) {
  std::vector<std::vector<int32_t>> answers(group.ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      Rank& rank = **group.ranks[r].rank;
      DirectRunner runner(&rank.executor(), &rank.layout(), rank.pages());
      const std::vector<int32_t> prompt = {1, 4095, 0, 2048, 2047, 1024, 7};
      for (int step = 0; step < 5; ++step) {
        DirectStep direct = {.sequence_id = 1, .sample = GreedySample()};
        if (step == 0) direct.token_ids = prompt;
        auto result = runner.Run(absl::MakeConstSpan(&direct, 1));
        KVASIR_ASSERT_OK(result);
        answers[r].push_back(result->sequences(0).token_id());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answers;
}

TEST(GroupMemoryTest, EachRankHoldsOnlyItsShareOfWeightsAndLatents) {
  const SavedCheckpoint saved(WideShape(), kernels::DType::kBf16);
  const auto plan = WholePlan(WideShape());
  const auto one = LoadGroup({saved.folder()}, plan);
  KVASIR_ASSERT_OK(one->ranks[0].rank);
  const Rank& whole = **one->ranks[0].rank;
  const auto answer = Answers(*one);
  for (const int64_t size : {2, 4}) {
    const auto group = LoadGroup(
        std::vector<std::string>(static_cast<size_t>(size), saved.folder()),
        plan, whole.pages());
    for (const LoadedRank& loaded : group->ranks) {
      KVASIR_ASSERT_OK(loaded.rank);
      const Rank& rank = **loaded.rank;
      EXPECT_EQ(rank.pages(), whole.pages());
      for (const auto tag :
           {kernels::MemoryTag::kWeights, kernels::MemoryTag::kKvCache}) {
        EXPECT_LE(ShareOf(rank.allocator().use(tag).bytes,
                          whole.allocator().use(tag).bytes),
                  1.0 / static_cast<double>(size) + 0.1);
      }
    }
    for (const auto& other : Answers(*group)) EXPECT_EQ(other, answer[0]);
  }
}

// Changes one weight in one host's copy of the files, at a place that only that
// host's rank reads.
TEST(GroupMemoryTest, AChangedWeightThatOnlyOneRankReadsChangesTheWeightsId) {
  const SavedCheckpoint saved(WideShape(), kernels::DType::kBf16);
  const auto plan = WholePlan(WideShape());
  const auto good = LoadGroup({saved.folder(), saved.folder()}, plan);
  KVASIR_ASSERT_OK(good->ranks[0].rank);
  struct Place {
    const char* tensor;
    int64_t row;
    int64_t column;
  };
  int copies = 0;
  for (const Place& place :
       {Place{"model.layers.0.self_attn.q_proj.weight", 1023, 0},
        Place{"model.layers.0.mlp.down_proj.weight", 0, 4095},
        Place{"lm_head.weight", 4095, 1023}}) {
    const std::string spoiled = saved.Copy(absl::StrCat(copies++));
    FlipNumber(spoiled, place.tensor, place.row, place.column);
    const auto second = LoadGroup({saved.folder(), spoiled}, plan);
    KVASIR_ASSERT_OK(second->ranks[0].rank);
    EXPECT_NE((*second->ranks[0].rank)->weights_id(),
              (*good->ranks[0].rank)->weights_id())
        << place.tensor;
    EXPECT_NE((*second->ranks[0].rank)->cache_id(),
              (*good->ranks[0].rank)->cache_id());
    // Rank 0 does not read this place, so a change in its copy has no effect.
    const auto first = LoadGroup({spoiled, saved.folder()}, plan);
    KVASIR_ASSERT_OK(first->ranks[0].rank);
    EXPECT_EQ((*first->ranks[0].rank)->weights_id(),
              (*good->ranks[0].rank)->weights_id())
        << place.tensor;
  }
  // Both ranks read this tensor, so the difference is found.
  const std::string norm = saved.Copy("norm");
  FlipNumber(norm, "model.norm.weight", 3, 0);
  const auto differ = LoadGroup({saved.folder(), norm}, plan);
  for (const LoadedRank& loaded : differ->ranks) {
    EXPECT_THAT(loaded.rank,
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("rank 1: tensor "
                                   "model.norm.weight, tile 0, "
                                   "0: it has read other bytes than rank 0")));
  }
}

// Under these plans a head group may lie on one rank or on several, and several
// ranks may hold the same KV head. In each case the ranks together must read
// all weights.
TEST(GroupMemoryTest, UnderEveryPlanAGroupComputesTheWeightsIdOfASingleRank) {
  const model::DecoderSpec spec = *model::SpecOfShape(TinyShape());
  for (const PlanCase& plan_case : PlanCases()) {
    SCOPED_TRACE(plan_case.name);
    const kvasir::v1::KvPlan plan = PlanOf(plan_case, spec, "F32");
    const plan::ResolvedPlan resolved = Resolved(plan, spec);
    const SavedCheckpoint saved(TinyShape(), kernels::DType::kF32, &resolved);
    const auto one = LoadGroup({saved.folder()}, plan);
    KVASIR_ASSERT_OK(one->ranks[0].rank);
    for (const size_t size : {2, 8}) {
      const auto group =
          LoadGroup(std::vector<std::string>(size, saved.folder()), plan);
      for (const LoadedRank& loaded : group->ranks) {
        KVASIR_ASSERT_OK(loaded.rank);
        EXPECT_EQ((*loaded.rank)->weights_id(),
                  (*one->ranks[0].rank)->weights_id());
      }
    }
  }
}

// A model with random weights whose sizes are counted without making the
// weights.
struct Counted {
  Counted(const std::string& shape_name, const std::string& preset)
      : shape(*model::FindShape(shape_name)),
        spec(*model::SpecOfShape(shape)),
        plan(*plan::MakePresetPlan(preset, model::AttentionShapeOf(spec))),
        source(*RandomSource::Create(shape, spec, Resolved(plan, spec), 1,
                                     kernels::DType::kBf16)) {}

  int64_t WeightBytes(plan::TpShard shard) const {
    return *CountWeightBytes(spec, Served(plan, spec, {}, shard), source.get(),
                             MatrixFormat());
  }
  int64_t ReadBytes(plan::TpShard shard) const {
    return *CountReadBytes(spec, Served(plan, spec, {}, shard), source.get());
  }
  cache::PageLayout Layout(plan::TpShard shard) const {
    return *cache::PageLayout::Create(plan, model::AttentionShapeOf(spec), {},
                                      shard);
  }

  model::ModelShape shape;
  model::DecoderSpec spec;
  kvasir::v1::KvPlan plan;
  std::unique_ptr<RandomSource> source;
};

// Returns the bytes of a fixed number of pages of each page group.
int64_t PoolBytes(const cache::PageLayout& layout) {
  constexpr int64_t kPages = 2048;
  int64_t bytes = 0;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    bytes += kPages * group.page_bytes;
  }
  return bytes;
}

// Whether a latent on this rank is shared with heads of other ranks. Each of
// these other ranks then stores its own copy.
bool HasSharedLatents(const cache::PageLayout& layout) {
  for (const cache::LayerLayout& layer : layout.layers()) {
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      for (const cache::PartLayout& part : layer.side(side).parts) {
        for (const cache::GroupLayout& group : part.groups) {
          for (const int64_t head : group.heads) {
            if (!layout.kv_heads().Contains(head)) return true;
          }
        }
      }
    }
  }
  return false;
}

TEST(GroupMemoryTest, ARankOfALargeModelHoldsOnlyItsShareOfWeightsAndPages) {
  // Presets and numbers of ranks for which several ranks store the same
  // latents. With 4 ranks each rank has 2 heads, so a group of 4 heads lies on
  // two ranks. With SVDq one group has all heads, so it lies on all ranks.
  const std::set<std::pair<std::string, int64_t>> expected = {
      {"commuting-50", 4},    {"palu-50-g4", 4},      {"palu-50-g4-4bit", 4},
      {"palu-50-g4-3bit", 4}, {"palu-50-g4-2bit", 4}, {"svdq-84442200", 2},
      {"svdq-84442200", 4},   {"svdq-44220000", 2},   {"svdq-44220000", 4}};
  std::set<std::pair<std::string, int64_t>> shared;
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    const Counted counted("llama-3-8b", preset.name);
    const int64_t weights = counted.WeightBytes({});
    const int64_t pool = PoolBytes(counted.Layout({}));
    for (const int64_t size : {2, 4}) {
      const double most = 1.0 / static_cast<double>(size) + 0.1;
      for (int64_t rank = 0; rank < size; ++rank) {
        SCOPED_TRACE(absl::StrCat(preset.name, " on ", rank, " of ", size));
        const cache::PageLayout layout = counted.Layout({rank, size});
        EXPECT_LE(ShareOf(counted.WeightBytes({rank, size}), weights), most);
        if (HasSharedLatents(layout)) {
          shared.emplace(preset.name, size);
        } else {
          EXPECT_LE(ShareOf(PoolBytes(layout), pool), most);
        }
      }
    }
  }
  EXPECT_EQ(shared, expected);
}

TEST(GroupMemoryTest, ARankOfALargeModelReadsOnlyItsShareOfTheWeights) {
  for (const char* shape : {"tinyllama-1.1b", "llama-3-8b"}) {
    const Counted counted(shape, plan::kDensePreset);
    const int64_t all = counted.ReadBytes({});
    EXPECT_EQ(all, 2 * model::CountParameters(counted.shape));
    // Not tested with 8 ranks, because two of them would read 5.8 % more than
    // an eighth: each KV head of the small model would be on two ranks, and
    // shares would not be whole tiles.
    for (const int64_t size : {2, 4}) {
      for (int64_t rank = 0; rank < size; ++rank) {
        EXPECT_LE(ShareOf(counted.ReadBytes({rank, size}), all),
                  1.0 / static_cast<double>(size) + 0.05)
            << shape << ": " << rank << " of " << size;
      }
    }
  }
}

TEST(GroupMemoryTest, RanksAgreeOnTheSmallestPoolsThatAnyRankOffers) {
  ThreadAgreement agreement(2);
  const auto collectives = InProcessGroup::Create(2);
  std::vector<std::unique_ptr<Rank>> ranks(2);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      RankOptions options = TinyOptions();
      options.kv_cache_bytes = r == 0 ? 4 << 20 : 2 << 20;
      options.host_pool_bytes = r == 0 ? 1 << 20 : 3 << 20;
      options.agree = agreement.Of(static_cast<int64_t>(r));
      KVASIR_ASSERT_OK_AND_ASSIGN(ranks[r],
                                  MakeTinyRank(options, collectives[r].get()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<RankOffer> offers = agreement.offers();
  EXPECT_GT(offers[0].pages[0], offers[1].pages[0]);
  EXPECT_LT(offers[0].host_pages[0], offers[1].host_pages[0]);
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->pages(), offers[1].pages);
    EXPECT_EQ(rank->host_pages(), offers[0].host_pages);
    EXPECT_EQ(rank->weights_id(), ranks[0]->weights_id());
  }
  EXPECT_EQ(offers[0].weight_bytes,
            ranks[0]->allocator().use(kernels::MemoryTag::kWeights).bytes);
  // The pools have the same size, because both ranks have the agreed pages.
  EXPECT_EQ(ranks[0]->allocator().use(kernels::MemoryTag::kKvCache).bytes,
            ranks[1]->allocator().use(kernels::MemoryTag::kKvCache).bytes);
}

TEST(GroupMemoryTest, ARankRefusesAnAgreementOfTheGroupThatItCannotMeet) {
  const auto refused = [](const auto& change, const char* why) {
    RankOptions options = TinyOptions();
    options.agree =
        [&](const RankOffer& offer) -> absl::StatusOr<RankAgreement> {
      RankAgreement agreed = {offer.pages, offer.host_pages, "w", ""};
      change(&agreed);
      return agreed;
    };
    EXPECT_THAT(
        MakeTinyRank(options),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(why)));
  };
  refused([](RankAgreement* agreed) { ++agreed->pages[0]; },
          "the group agreed on page pools of");
  refused([](RankAgreement* agreed) { agreed->pages.pop_back(); },
          "this rank has room for");
  refused([](RankAgreement* agreed) { agreed->pages[0] = -1; }, "of -1 pages");
  refused([](RankAgreement* agreed) { agreed->host_pages[0] = 1; },
          "host pools of 1 pages");
  refused([](RankAgreement* agreed) { agreed->pages[0] = 1; }, "128 tokens");
  refused([](RankAgreement* agreed) { agreed->cache_id = "other"; },
          "cache_id is other");
}

}  // namespace
}  // namespace kvasir::worker
