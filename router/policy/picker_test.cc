#include "router/policy/picker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

namespace kvasir::router {
namespace {

using ::testing::Each;
using ::testing::Ge;
using ::testing::IsEmpty;
using ::testing::Le;

using Pages = std::vector<uint64_t>;
constexpr uint32_t kPageTokens = 64;

Pages Chain(uint64_t name, size_t count) {
  Pages pages;
  for (size_t i = 0; i < count; ++i) pages.push_back(MixBits(name, i));
  return pages;
}

Pages Then(Pages first, uint64_t name, size_t count) {
  const uint64_t parent = first.empty() ? 0 : first.back();
  for (const uint64_t page : Chain(MixBits(parent, name), count)) {
    first.push_back(page);
  }
  return first;
}

std::vector<ReplicaView> Idle(size_t count) {
  std::vector<ReplicaView> replicas(count);
  for (size_t i = 0; i < count; ++i) {
    replicas[i].eligible = true;
    replicas[i].free_pages = replicas[i].total_pages = 10000;
    replicas[i].page_tokens = kPageTokens;
    replicas[i].max_num_seqs = 64;
    replicas[i].name = MixBits(77, i);
    replicas[i].incarnation = i + 1;
  }
  return replicas;
}

PickerOptions Options(double load_factor = 1.25) {
  return {.policy = PolicyKind::kPrefixAffinity,
          .load_factor = load_factor,
          .prefix_bytes = 1 << 20,
          .seed = 3};
}

size_t Pick(ReplicaPicker* picker, const std::vector<ReplicaView>& replicas,
            const Pages& pages, uint64_t session = 0) {
  return picker
      ->Pick(replicas, {.prompt_tokens = pages.size() * kPageTokens,
                        .pages = pages,
                        .session = session})
      .value_or(replicas.size());
}

void Load(std::vector<ReplicaView>* replicas, uint32_t running) {
  for (ReplicaView& replica : *replicas) replica.running = running;
}

TEST(ReplicaPickerTest, ATurnOfAConversationGoesWhereItsLastTurnWent) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(8);
  Load(&replicas, 8);
  std::map<uint64_t, size_t> places;
  for (uint64_t name = 0; name < 50; ++name) {
    places[name] = Pick(&picker, replicas, Chain(name, 4));
  }
  for (uint64_t name = 0; name < 50; ++name) {
    EXPECT_EQ(Pick(&picker, replicas, Then(Chain(name, 4), 99, 3)),
              places[name]);
  }
}

TEST(ReplicaPickerTest, TheLongestHitDecidesAndThenTheLoad) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(3);
  Load(&replicas, 8);
  replicas[0].eligible = replicas[1].eligible = false;
  Pick(&picker, replicas, Then(Chain(1, 3), 2, 2));
  replicas = Idle(3);
  Load(&replicas, 8);
  replicas[2].eligible = false;
  const size_t second = Pick(&picker, replicas, Chain(1, 3));
  replicas[2].eligible = true;
  EXPECT_EQ(Pick(&picker, replicas, Then(Chain(1, 3), 2, 2)), 2u);
  replicas[2].running = 9;
  EXPECT_EQ(Pick(&picker, replicas, Then(Chain(1, 3), 2, 2)), 2u);
  // Both have the first three pages.
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 3)), second);
}

TEST(ReplicaPickerTest, AReplicaFarAboveTheMeanGetsNoMoreRequests) {
  ReplicaPicker picker(Options(1.25));
  std::vector<ReplicaView> replicas = Idle(4);
  Load(&replicas, 8);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  // With 35 requests at 4 replicas, 36 / 4 * 1.25 = 11.25; with 36, 11.6.
  replicas[home].running = 11;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), home);
  replicas[home].running = 12;
  EXPECT_NE(Pick(&picker, replicas, Chain(1, 4)), home);
}

TEST(ReplicaPickerTest, AFewRequestsAreNoLoad) {
  ReplicaPicker picker(Options(1.0));
  std::vector<ReplicaView> replicas = Idle(4);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  replicas[home].running = 3;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), home);
  replicas[home].running = 4;
  EXPECT_NE(Pick(&picker, replicas, Chain(1, 4)), home);
}

TEST(ReplicaPickerTest, ABoundIsInProportionToTheSeats) {
  ReplicaPicker picker(Options(1.0));
  std::vector<ReplicaView> replicas = Idle(2);
  replicas[0].max_num_seqs = 96;
  replicas[1].max_num_seqs = 32;
  for (int i = 0; i < 40; ++i) {
    ++replicas[Pick(&picker, replicas, Chain(1, 4))].unreported_requests;
  }
  EXPECT_EQ(replicas[0].unreported_requests, 30u);
}

TEST(ReplicaPickerTest, ARequestDoesNotWaitForItsPagesIfAnotherReplicaIsFree) {
  ReplicaPicker picker(Options(4.0));
  std::vector<ReplicaView> replicas = Idle(2);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  replicas[home].max_num_seqs = 2;
  replicas[home].running = 2;
  replicas[1 - home].running = 1;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), 1 - home);
  // The prompt does not fit the replica's free pages.
  replicas[home].running = 0;
  replicas[home].free_pages = 3;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), 1 - home);
}

// One tenant sends the same long prompt again and again.
TEST(ReplicaPickerTest, AHotPrefixIsSpreadOverAllReplicas) {
  for (const size_t count : {2, 8, 100}) {
    ReplicaPicker picker(Options());
    std::vector<ReplicaView> replicas = Idle(count);
    for (size_t i = 0; i < 20 * count; ++i) {
      ++replicas[Pick(&picker, replicas, Chain(1, 40))].unreported_requests;
    }
    std::vector<uint32_t> requests;
    for (const ReplicaView& replica : replicas) {
      requests.push_back(replica.unreported_requests);
    }
    EXPECT_THAT(requests, Each(Le(25u)));
    EXPECT_THAT(requests, Each(Ge(14u)));
  }
}

TEST(ReplicaPickerTest, ANewReplicaGetsItsShareOfACommonPrefix) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(8);
  replicas[7].eligible = false;
  for (int i = 0; i < 70; ++i) {
    ++replicas[Pick(&picker, replicas, Chain(1, 4))].unreported_requests;
  }
  replicas[7].eligible = true;
  for (int i = 0; i < 10; ++i) {
    ++replicas[Pick(&picker, replicas, Chain(1, 4))].unreported_requests;
  }
  EXPECT_GE(replicas[7].unreported_requests, 8u);
}

TEST(ReplicaPickerTest, PromptsWithoutAHitGoToTheLeastLoadedReplica) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(4);
  Load(&replicas, 8);
  replicas[2].running = 7;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), 2u);
}

TEST(ReplicaPickerTest, PromptsWithoutAFullPageAreSpreadLikeLeastLoaded) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(4);
  for (int i = 0; i < 32; ++i) {
    ++replicas[Pick(&picker, replicas, {})].unreported_requests;
  }
  for (const ReplicaView& replica : replicas) {
    EXPECT_EQ(replica.unreported_requests, 8u);
  }
}

TEST(ReplicaPickerTest, ReturnsNothingIfNoReplicaIsEligible) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(1);
  replicas[0].eligible = false;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), 1u);
  EXPECT_EQ(Pick(&picker, {}, Chain(1, 4)), 0u);
}

TEST(ReplicaPickerTest, AReplicaThatMayNotBeAskedIsNotChosenForItsPages) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(4);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  replicas[home].eligible = false;
  EXPECT_NE(Pick(&picker, replicas, Chain(1, 4)), home);
}

TEST(ReplicaPickerTest, ARestartedWorkerCountsAsEmpty) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(4);
  Load(&replicas, 8);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  replicas[home].running = 9;
  replicas[home].incarnation = 100;
  EXPECT_NE(Pick(&picker, replicas, Chain(1, 4)), home);
}

TEST(ReplicaPickerTest, RoutersThatShareNoStateAgreeOnIdleReplicas) {
  ReplicaPicker one(Options());
  PickerOptions other_options = Options();
  other_options.seed = 4;
  ReplicaPicker other(other_options);
  const std::vector<ReplicaView> replicas = Idle(8);
  std::vector<ReplicaView> reversed(replicas.rbegin(), replicas.rend());
  std::set<size_t> places;
  for (uint64_t name = 0; name < 40; ++name) {
    const size_t place = Pick(&one, replicas, Chain(name, 3));
    EXPECT_EQ(Pick(&other, reversed, Chain(name, 3)), 7 - place);
    places.insert(place);
  }
  EXPECT_GE(places.size(), 6u);
}

TEST(ReplicaPickerTest, ASessionStaysUnlessItsReplicaIsOverloadedOrLost) {
  ReplicaPicker one(Options());
  ReplicaPicker other(Options());
  std::vector<ReplicaView> replicas = Idle(8);
  Load(&replicas, 8);
  int moved = 0;
  for (uint64_t session = 1; session <= 200; ++session) {
    const size_t home = Pick(&one, replicas, {}, session);
    EXPECT_EQ(Pick(&other, replicas, Chain(1, 4), session), home);
    replicas[home].running = 20;
    EXPECT_NE(Pick(&one, replicas, {}, session), home);
    replicas[home].running = 8;
    replicas[3].eligible = false;
    const size_t without = Pick(&one, replicas, {}, session);
    if (home != 3) {
      EXPECT_EQ(without, home);
    }
    moved += home == 3;
    replicas[3].eligible = true;
  }
  EXPECT_NEAR(moved, 25, 20);
}

TEST(ReplicaPickerTest, SlotsOfLostReplicasAreUsedAgain) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(3);
  Load(&replicas, 8);
  const size_t home = Pick(&picker, replicas, Chain(1, 4));
  // The other replicas restart more often than there are slots.
  uint64_t incarnation = 1000;
  for (int i = 0; i < 30000; ++i) {
    for (size_t r = 0; r < 3; ++r) {
      if (r != home) replicas[r].incarnation = ++incarnation;
    }
    Pick(&picker, replicas, Chain(1000 + static_cast<uint64_t>(i), 1));
    if (i % 100 == 0) {
      ASSERT_EQ(Pick(&picker, replicas, Chain(1, 4)), home);
    }
  }
}

TEST(ReplicaPickerTest, MoreReplicasThanSlotsAreStillUsed) {
  ReplicaPicker picker(Options());
  std::vector<ReplicaView> replicas = Idle(PrefixMap::kMaxSlots + 10);
  for (ReplicaView& replica : replicas) replica.running = 8;
  replicas.back().running = 0;
  EXPECT_EQ(Pick(&picker, replicas, Chain(1, 4)), PrefixMap::kMaxSlots + 9);
}

TEST(ReplicaPickerTest, KeysAreTheNamesThatTheWorkersCachesUse) {
  ReplicaPicker picker(Options());
  std::vector<int32_t> ids(200);
  for (int32_t i = 0; i < 200; ++i) ids[static_cast<size_t>(i)] = 7 * i;
  const Pages keys =
      picker.KeysOf(proto::TokenBytes::FromIds(ids), "salt", "cache", 64);
  ASSERT_EQ(keys.size(), 3u);
  const auto hasher = cache::MakePrefixHasher("cache");
  cache::PrefixHash hash = hasher->Root("salt");
  for (size_t i = 0; i < 3; ++i) {
    hash = hasher->Extend(hash, absl::MakeConstSpan(ids).subspan(i * 64, 64));
    EXPECT_EQ(0, std::memcmp(&keys[i], hash.bytes.data(), 8));
  }
}

TEST(ReplicaPickerTest, TenantsWithDifferentSaltsShareNoKeys) {
  ReplicaPicker picker(Options());
  const auto prompt = proto::TokenBytes::FromIds(std::vector<int32_t>(640, 5));
  std::set<uint64_t> keys;
  for (const char* salt : {"", "a", "b"}) {
    for (const uint64_t key : picker.KeysOf(prompt, salt, "cache", 64)) {
      keys.insert(key);
    }
  }
  EXPECT_EQ(keys.size(), 30u);
}

TEST(ReplicaPickerTest, OnlyFullPagesHaveKeysAndOnlyTheFirstOnes) {
  ReplicaPicker picker(Options());
  const auto prompt = [](size_t tokens) {
    return proto::TokenBytes::FromIds(std::vector<int32_t>(tokens, 5));
  };
  EXPECT_THAT(picker.KeysOf({}, "", "c", 64), IsEmpty());
  EXPECT_THAT(picker.KeysOf(prompt(1), "", "c", 64), IsEmpty());
  EXPECT_THAT(picker.KeysOf(prompt(63), "", "c", 64), IsEmpty());
  EXPECT_EQ(picker.KeysOf(prompt(64), "", "c", 64).size(), 1u);
  EXPECT_EQ(picker.KeysOf(prompt(128 << 10), "", "c", 64).size(),
            kMaxKeyedPages);
  EXPECT_THAT(picker.KeysOf(prompt(64), "", "c", 0), IsEmpty());
}

TEST(ReplicaPickerTest, OtherPoliciesNeedNoKeysAndTakeTurns) {
  ReplicaPicker picker({.policy = PolicyKind::kRoundRobin});
  EXPECT_THAT(
      picker.KeysOf(proto::TokenBytes::FromIds(std::vector<int32_t>(640, 5)),
                    "", "c", 64),
      IsEmpty());
  const std::vector<ReplicaView> replicas = Idle(3);
  for (size_t turn = 0; turn < 5; ++turn) {
    EXPECT_EQ(Pick(&picker, replicas, {}), turn % 3);
  }
}

}  // namespace
}  // namespace kvasir::router
