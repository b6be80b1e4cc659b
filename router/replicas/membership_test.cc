#include "router/replicas/membership.h"

#include <algorithm>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAreArray;

constexpr MembershipRules kDns = {.answers_to_remove = 3,
                                  .empty_keeps_live = true};

std::vector<WorkerAddress> List(const std::vector<std::string>& targets) {
  std::vector<WorkerAddress> list;
  for (const std::string& target : targets) list.push_back({target});
  return list;
}

std::vector<std::string> Targets(const Membership& members) {
  std::vector<std::string> targets;
  for (const WorkerAddress& each : members.workers()) {
    targets.push_back(each.target);
  }
  return targets;
}

bool AllLive(const std::string&) { return true; }
bool NoneLive(const std::string&) { return false; }

TEST(MembershipTest, AddressesKeepTheirOrderAndCountOnce) {
  Membership members(kDns);
  members.OnAnswer(List({"b", "a", "b"}), AllLive);
  EXPECT_THAT(Targets(members), ElementsAre("b", "a"));
  members.OnAnswer(List({"a", "c", "b", "c"}), AllLive);
  EXPECT_THAT(Targets(members), ElementsAre("b", "a", "c"));
}

TEST(MembershipTest, AnAddressIsRemovedAfterAFewAnswersInARowWithoutIt) {
  Membership members(kDns);
  members.OnAnswer(List({"a", "b"}), AllLive);
  for (int i = 0; i < 2; ++i) members.OnAnswer(List({"b"}), AllLive);
  members.OnAnswer(List({"a", "b"}), AllLive);
  for (int i = 0; i < 2; ++i) members.OnAnswer(List({"b"}), AllLive);
  EXPECT_THAT(Targets(members), ElementsAre("a", "b"));
  members.OnAnswer(List({"b"}), AllLive);
  EXPECT_THAT(Targets(members), ElementsAre("b"));
}

TEST(MembershipTest, EmptyAnswersRemoveOnlyWorkersThatAreNotConnected) {
  Membership members(kDns);
  members.OnAnswer(List({"a", "b"}), AllLive);
  const auto only_a = [](const std::string& target) { return target == "a"; };
  for (int i = 0; i < 2; ++i) members.OnAnswer({}, only_a);
  EXPECT_THAT(Targets(members), ElementsAre("a", "b"));
  for (int i = 0; i < 9; ++i) members.OnAnswer({}, only_a);
  EXPECT_THAT(Targets(members), ElementsAre("a"));
  for (int i = 0; i < 3; ++i) members.OnAnswer({}, NoneLive);
  EXPECT_THAT(Targets(members), IsEmpty());
}

TEST(MembershipTest, AFilesAnswerCountsAtOnceEvenIfItIsEmpty) {
  Membership members(MembershipRules{});
  members.OnAnswer(List({"a", "b"}), AllLive);
  members.OnAnswer(List({"b"}), AllLive);
  EXPECT_THAT(Targets(members), ElementsAre("b"));
  members.OnAnswer({}, AllLive);
  EXPECT_THAT(Targets(members), IsEmpty());
}

// A name server that fails, repeats old answers, leaves out, duplicates and
// reorders addresses, while workers come and go.
TEST(MembershipTest, WrongAnswersNeitherLoseLiveAddressesNorKeepDeadOnes) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto one_in = [&random](uint32_t n) { return random() % n == 0; };
    Membership members(kDns);
    const std::vector<std::string> always = {"x", "y"};
    std::set<std::string> now = {"x", "y"};
    std::vector<std::set<std::string>> history = {now};
    const auto live = [&now](const std::string& target) {
      return now.contains(target);
    };
    int bad = 0;  // answers in a row that lack addresses
    members.OnAnswer(List(always), live);
    for (int step = 0; step < 100; ++step) {
      const std::string worker = absl::StrCat("w", random() % 6);
      if (one_in(2) && !now.erase(worker)) now.insert(worker);
      history.push_back(now);
      if (one_in(4)) continue;  // the lookup fails
      const size_t age = std::min<size_t>(random() % 4, history.size() - 1);
      std::vector<std::string> answer;
      const bool may_lack = bad < 2;
      bool lacks = false;
      for (const std::string& each : history[history.size() - 1 - age]) {
        if (may_lack && one_in(8)) {
          lacks = true;
          continue;
        }
        answer.push_back(each);
        if (one_in(4)) answer.push_back(each);
      }
      if (one_in(10)) {
        answer.clear();
      } else {
        bad = lacks ? bad + 1 : 0;
      }
      std::shuffle(answer.begin(), answer.end(), random);
      members.OnAnswer(List(answer), live);
      ASSERT_THAT(Targets(members), IsSupersetOf(always)) << seed;
    }
    for (int i = 0; i < 3; ++i) {
      members.OnAnswer(List({now.begin(), now.end()}), live);
    }
    ASSERT_THAT(Targets(members), UnorderedElementsAreArray(now)) << seed;
  }
}

}  // namespace
}  // namespace kvasir::router
