#include "worker/ranks/group/rank_group_state.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kvasir::v1::FollowerMessage;
using kvasir::v1::LeaderMessage;
using kvasir::v1::RankHello;
using kvasir::v1::RankReady;
using kvasir::v1::RankRefusal;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Phase = RankGroupState::Phase;

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(3);

RankGroupOptions Options(uint32_t size) {
  RankGroupOptions options;
  kvasir::v1::RankIdentity& identity = options.identity;
  identity.set_api_version(kRankApiVersion);
  identity.set_build("1.2.3");
  identity.set_tp_size(size);
  identity.set_checkpoint_id("checkpoint");
  identity.set_plan_id("plan");
  identity.set_page_format_id("format");
  identity.set_page_tokens(64);
  identity.set_device("cpu");
  identity.set_collective("gloo");
  identity.set_numerics_id("numerics");
  identity.set_plan_check("off");
  identity.set_key_means("off");
  identity.set_max_model_len(4096);
  identity.set_max_num_seqs(8);
  identity.set_max_batched_tokens(512);
  identity.set_vocab_size(1000);
  identity.set_heartbeat_timeout_ms(3000);
  options.collective_address = "address 0";
  // Not used: tests call OnCombined themselves.
  options.combine = [](absl::Span<const std::string>) { return CombinedIds(); };
  options.join_timeout = absl::Seconds(20);
  options.load_timeout = absl::Seconds(30);
  options.step_timeout = absl::Seconds(10);
  return options;
}

RankReady Ready(std::vector<int64_t> pages, std::vector<int64_t> host = {}) {
  RankReady ready;
  ready.mutable_pages()->Add(pages.begin(), pages.end());
  ready.mutable_host_pages()->Add(host.begin(), host.end());
  return ready;
}

std::string Text(const LeaderMessage& message) {
  switch (message.message_case()) {
    case LeaderMessage::kWelcome:
      return absl::StrCat(
          "welcome ",
          absl::StrJoin(message.welcome().collective_addresses(), "|"));
    case LeaderMessage::kRefusal:
      return RankRefusal::Reason_Name(message.refusal().reason());
    case LeaderMessage::kStart:
      return absl::StrCat("start ", message.start().weights_id(), " ",
                          message.start().cache_id(), " ",
                          absl::StrJoin(message.start().pages(), ","), "/",
                          absl::StrJoin(message.start().host_pages(), ","));
    case LeaderMessage::kHeartbeat:
      return "heartbeat";
    case LeaderMessage::kDrain:
      return "drain";
    case LeaderMessage::kAbort:
      return absl::StrCat("abort ", message.abort().reason());
    default:
      return "?";
  }
}

// A leader's state and the clock of its events. Rank r uses link r by default.
// Done() lists actions as "LINK: MESSAGE" and "LINK closed: CODE".
class Group {
 public:
  explicit Group(uint32_t size = 3) : state_(Options(size), now_) {}

  RankHello Hello(uint32_t rank) const {
    RankHello hello;
    *hello.mutable_identity() = options_.identity;
    hello.mutable_identity()->set_tp_size(size_);
    hello.set_rank(rank);
    hello.set_host("node");
    hello.set_pid(10 + rank);
    hello.set_collective_address(absl::StrCat("address ", rank));
    return hello;
  }
  static Group Of(uint32_t size, Phase phase) {
    Group group(size);
    group.size_ = size;
    if (phase == Phase::kJoining) return group;
    for (uint32_t rank = 1; rank < size; ++rank) group.Join(rank);
    if (phase == Phase::kRunning) {
      group.state_.OnReady(Ready({7}));
      for (uint32_t rank = 1; rank < size; ++rank) {
        group.SendReady(rank, Ready({7}));
      }
      EXPECT_TRUE(group.state_.TakeTiles().has_value());
      group.state_.OnCombined(CombinedIds());
    }
    EXPECT_EQ(group.state_.phase(), phase);
    (void)group.Done();
    (void)group.Events();
    return group;
  }

  RankGroupState& state() { return state_; }

  void Link(uint64_t link) { state_.OnLink(link, true, "ipv4:peer", now_); }
  void Send(uint64_t link, FollowerMessage message) {
    state_.OnMessage(link, &message, now_);
  }
  void SendHello(uint64_t link, const RankHello& hello) {
    FollowerMessage message;
    *message.mutable_hello() = hello;
    Send(link, message);
  }
  void Join(uint32_t rank) {
    Link(rank);
    SendHello(rank, Hello(rank));
  }
  void SendReady(uint64_t link, const RankReady& ready) {
    FollowerMessage message;
    *message.mutable_ready() = ready;
    Send(link, message);
  }
  void SendDone(uint64_t link, uint64_t step, uint64_t hash, int code = 0) {
    FollowerMessage message;
    message.mutable_step_done()->set_step_id(step);
    message.mutable_step_done()->set_result_hash(hash);
    message.mutable_step_done()->set_code(code);
    if (code != 0) message.mutable_step_done()->set_error("no memory");
    Send(link, message);
  }
  void SendHeartbeat(uint64_t link) {
    FollowerMessage message;
    message.mutable_heartbeat();
    Send(link, message);
  }
  absl::Status Step(uint64_t id) { return state_.OnStep(id, now_); }

  // Advances time in steps of 250 ms; in each of them the links in `alive` send
  // a heartbeat.
  void Pass(absl::Duration time, const std::vector<uint64_t>& alive) {
    const absl::Time until = now_ + time;
    while (now_ < until) {
      now_ += absl::Milliseconds(250);
      for (const uint64_t link : alive) SendHeartbeat(link);
      state_.OnTime(now_);
    }
  }
  // Advances time in one step, as if the leader's process had not run in the
  // meantime.
  void Jump(absl::Duration time) {
    now_ += time;
    state_.OnTime(now_);
  }

  std::vector<std::string> Done() {
    std::vector<std::string> done;
    for (const RankGroupState::Action& action : state_.TakeActions()) {
      if (action.message.message_case() != LeaderMessage::MESSAGE_NOT_SET &&
          !action.message.has_heartbeat()) {
        done.push_back(absl::StrCat(action.link, ": ", Text(action.message)));
      }
      if (action.close.has_value()) {
        done.push_back(absl::StrCat(
            action.link,
            " closed: ", absl::StatusCodeToString(action.close->code())));
      }
    }
    return done;
  }
  std::vector<std::string> Events() {
    std::vector<std::string> events;
    for (const RankGroupState::Event& event : state_.TakeEvents()) {
      events.push_back(absl::StrCat(event.ranks, "; ", event.detail));
    }
    return events;
  }

 private:
  const RankGroupOptions options_ = Options(3);
  uint32_t size_ = 3;
  absl::Time now_ = absl::UnixEpoch();
  RankGroupState state_;
};

TEST(RankGroupOptionsTest, InvalidOptionsAreRefused) {
  KVASIR_EXPECT_OK(CheckRankGroupOptions(Options(2)));
  for (const uint32_t size : {0u, 1u, 257u}) {
    EXPECT_THAT(CheckRankGroupOptions(Options(size)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(
                             size, " ranks, but must have 2 to 256"))));
  }
  const std::pair<const char*, absl::Duration RankGroupOptions::*> timeouts[] =
      {{"join_timeout", &RankGroupOptions::join_timeout},
       {"load_timeout", &RankGroupOptions::load_timeout},
       {"step_timeout", &RankGroupOptions::step_timeout}};
  for (const auto& [name, timeout] : timeouts) {
    RankGroupOptions options = Options(2);
    options.*timeout = absl::ZeroDuration();
    EXPECT_THAT(CheckRankGroupOptions(options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat(name, " is 0, but must be more than 0")));
  }
  RankGroupOptions options = Options(2);
  options.combine = nullptr;
  EXPECT_THAT(CheckRankGroupOptions(options),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
  options = Options(2);
  options.identity.set_heartbeat_timeout_ms(0);
  EXPECT_THAT(CheckRankGroupOptions(options),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
}

// ---------------------------------------------------------------------------
// Joining
// ---------------------------------------------------------------------------

TEST(RankGroupStateTest,
     TheLeaderSendsAWelcomeToAllRanksOnceTheLastRankHasJoined) {
  Group group;
  group.Join(2);
  EXPECT_THAT(group.Done(), IsEmpty());
  EXPECT_THAT(group.Events(), ElementsAre("rank 2 (node, pid 12); "));
  group.Join(1);
  EXPECT_EQ(group.state().phase(), Phase::kLoading);
  EXPECT_THAT(group.Done(),
              ElementsAre("1: welcome address 0|address 1|address 2",
                          "2: welcome address 0|address 1|address 2"));
  EXPECT_THAT(group.state().collective_addresses(),
              ElementsAre("address 0", "address 1", "address 2"));
}

struct RefusedHello {
  std::string name;
  std::function<void(RankHello*)> change;
  RankRefusal::Reason reason;
  std::string detail;
};

class RefusedHelloTest : public ::testing::TestWithParam<RefusedHello> {};

TEST_P(RefusedHelloTest, ARefusedHelloIsLoggedOnceWithTheFieldAndItsValue) {
  Group group;
  group.Join(2);
  (void)group.Events();
  RankHello hello = group.Hello(1);
  GetParam().change(&hello);
  for (const uint64_t link : {8u, 9u}) {
    group.Link(link);
    group.SendHello(link, hello);
    const auto actions = group.state().TakeActions();
    ASSERT_EQ(actions.size(), 1u);
    EXPECT_EQ(actions[0].link, link);
    EXPECT_EQ(actions[0].message.refusal().reason(), GetParam().reason);
    EXPECT_EQ(actions[0].message.refusal().detail(), GetParam().detail);
    EXPECT_FALSE(actions[0].close->ok());
    EXPECT_EQ(actions[0].close->message(), GetParam().detail);
  }
  EXPECT_THAT(group.Events(),
              ElementsAre(HasSubstr(absl::StrCat(
                  "; ", RankRefusal::Reason_Name(GetParam().reason), ": ",
                  GetParam().detail))));
  // The group still waits for a matching rank.
  group.Join(1);
  EXPECT_EQ(group.state().phase(), Phase::kLoading);
}

INSTANTIATE_TEST_SUITE_P(
    Hellos, RefusedHelloTest,
    ::testing::ValuesIn(std::vector<RefusedHello>{
        {"ApiVersion",
         [](RankHello* h) { h->mutable_identity()->set_api_version("v2"); },
         RankRefusal::WRONG_VERSION,
         "api_version is \"v2\", the leader has \"kvasir.v1\""},
        {"Build",
         [](RankHello* h) { h->mutable_identity()->set_build("1.2.4"); },
         RankRefusal::WRONG_VERSION,
         "build is \"1.2.4\", the leader has \"1.2.3\""},
        {"Empty", [](RankHello* h) { h->Clear(); }, RankRefusal::WRONG_VERSION,
         "api_version is \"\", the leader has \"kvasir.v1\""},
        {"Size", [](RankHello* h) { h->mutable_identity()->set_tp_size(4); },
         RankRefusal::WRONG_SIZE, "tp_size is 4, the leader has 3"},
        {"ClaimsTheLeadersRank", [](RankHello* h) { h->set_rank(0); },
         RankRefusal::WRONG_RANK,
         "rank is 0, a follower of this group must have a rank from 1 to 2"},
        {"RankBeyondTheGroup", [](RankHello* h) { h->set_rank(3); },
         RankRefusal::WRONG_RANK,
         "rank is 3, a follower of this group must have a rank from 1 to 2"},
        {"Doubled", [](RankHello* h) { h->set_rank(2); },
         RankRefusal::RANK_TAKEN, "rank 2 (node, pid 12) has joined already"},
        {"Checkpoint",
         [](RankHello* h) { h->mutable_identity()->set_checkpoint_id("c"); },
         RankRefusal::WRONG_IDENTITY,
         "checkpoint_id is \"c\", the leader has \"checkpoint\""},
        {"Plan", [](RankHello* h) { h->mutable_identity()->clear_plan_id(); },
         RankRefusal::WRONG_IDENTITY,
         "plan_id is \"\", the leader has \"plan\""},
        {"PageFormat",
         [](RankHello* h) { h->mutable_identity()->set_page_format_id("f\n"); },
         RankRefusal::WRONG_IDENTITY,
         "page_format_id is \"f\\n\", the leader has \"format\""},
        {"PageTokens",
         [](RankHello* h) { h->mutable_identity()->set_page_tokens(32); },
         RankRefusal::WRONG_IDENTITY, "page_tokens is 32, the leader has 64"},
        {"Device",
         [](RankHello* h) { h->mutable_identity()->set_device("cuda"); },
         RankRefusal::WRONG_IDENTITY,
         "device is \"cuda\", the leader has \"cpu\""},
        {"Collective",
         [](RankHello* h) { h->mutable_identity()->set_collective("nccl"); },
         RankRefusal::WRONG_IDENTITY,
         "collective is \"nccl\", the leader has \"gloo\""},
        {"Numerics",
         [](RankHello* h) { h->mutable_identity()->set_numerics_id("n"); },
         RankRefusal::WRONG_IDENTITY,
         "numerics_id is \"n\", the leader has \"numerics\""},
        {"Deterministic",
         [](RankHello* h) { h->mutable_identity()->set_deterministic(true); },
         RankRefusal::WRONG_IDENTITY,
         "deterministic is true, the leader has false"},
        {"MaxModelLen",
         [](RankHello* h) { h->mutable_identity()->set_max_model_len(1); },
         RankRefusal::WRONG_IDENTITY,
         "max_model_len is 1, the leader has 4096"},
        {"HeartbeatTimeout",
         [](RankHello* h) {
           h->mutable_identity()->set_heartbeat_timeout_ms(9000);
         },
         RankRefusal::WRONG_IDENTITY,
         "heartbeat_timeout_ms is 9000, the leader has 3000"},
    }),
    [](const auto& each) { return each.param.name; });

// The first two hellos differ in plan_id, which is logged only once. The third
// differs only in page_tokens.
TEST(RankGroupStateTest,
     RepeatedRefusalsOfARankAreLoggedOnceForEachWrongField) {
  Group group;
  uint64_t link = 0;
  for (const char* const plan : {"other", "third", "plan"}) {
    RankHello hello = group.Hello(1);
    hello.mutable_identity()->set_plan_id(plan);
    hello.mutable_identity()->set_page_tokens(32);
    group.Link(++link);
    group.SendHello(link, hello);
  }
  EXPECT_THAT(group.Events(), ElementsAre(HasSubstr("plan_id is \"other\""),
                                          HasSubstr("page_tokens is 32")));
}

TEST(RankGroupStateTest, ADifferenceInAnyFieldOfARankIdentityIsFound) {
  Group group;
  const auto* descriptor = kvasir::v1::RankIdentity::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    kvasir::v1::RankIdentity other = group.Hello(1).identity();
    const auto* field = descriptor->field(i);
    const auto* reflection = other.GetReflection();
    if (field->cpp_type() == field->CPPTYPE_BOOL) {
      reflection->SetBool(&other, field, !reflection->GetBool(other, field));
    } else {
      reflection->ClearField(&other, field);
    }
    const auto difference = FirstDifference(group.Hello(1).identity(), other);
    ASSERT_TRUE(difference.has_value()) << field->name();
    EXPECT_EQ(difference->field, field->number());
  }
}

TEST(RankGroupStateTest, HostNamesOfOtherRanksAreShortenedAndEscaped) {
  Group group;
  RankHello hello = group.Hello(1);
  hello.mutable_identity()->set_plan_id(std::string(1000, 'x'));
  hello.set_host("\x1b[31m" + std::string(1000, 'h'));
  group.Link(1);
  group.SendHello(1, hello);
  const std::vector<std::string> events = group.Events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0], HasSubstr("rank 1 (\\x1b[31mhhh"));
  EXPECT_LT(events[0].size(), 500u);
}

TEST(RankGroupStateTest,
     ACallWithoutAuthenticationReceivesNoInformationAboutTheGroup) {
  Group group;
  group.state().OnLink(1, false, "ipv4:peer\n", absl::UnixEpoch());
  const auto actions = group.state().TakeActions();
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(actions[0].message.refusal().reason(),
            RankRefusal::UNAUTHENTICATED);
  EXPECT_EQ(actions[0].close->code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(group.Events(), ElementsAre(HasSubstr("a caller at ipv4:peer\\n; "
                                                    "UNAUTHENTICATED: ")));
  // Messages that the refused caller sends before its call ends are ignored.
  group.SendHello(1, group.Hello(1));
  EXPECT_THAT(group.Done(), IsEmpty());
  EXPECT_THAT(group.state().member_links(), IsEmpty());
}

TEST(RankGroupStateTest, TheFirstMessageOfAFollowerMustBeARankHello) {
  Group group;
  for (uint64_t link = 1; link <= 3; ++link) group.Link(link);
  group.SendHeartbeat(1);
  group.Send(2, FollowerMessage());
  group.state().OnGarbage(3, 17, absl::UnixEpoch());
  EXPECT_THAT(group.Done(),
              ElementsAre("1: NO_HELLO", "1 closed: INVALID_ARGUMENT",
                          "2: NO_HELLO", "2 closed: INVALID_ARGUMENT",
                          "3: NO_HELLO", "3 closed: INVALID_ARGUMENT"));
  EXPECT_THAT(group.Events(),
              ElementsAre("a caller at ipv4:peer; NO_HELLO: the first message "
                          "must be a RankHello, but is RankHeartbeat"));
  group.Link(4);
  group.Pass(kHeartbeatTimeout, {});
  EXPECT_THAT(group.Done(),
              ElementsAre("4: NO_HELLO", "4 closed: INVALID_ARGUMENT"));
}

TEST(RankGroupStateTest, ARankThatLeavesBeforeTheGroupIsCompleteMayRejoin) {
  struct Case {
    std::string name;
    std::function<void(Group*)> leave;
    std::vector<std::string> done;
    std::string events;
  };
  for (const Case& each : std::vector<Case>{
           {"lost",
            [](Group* g) {
              g->state().OnLost(1, absl::UnavailableError("reset"));
            },
            {},
            "rank 1 (node, pid 11); the call of rank 1 (node, pid 11) ended: "
            "reset"},
           {"silent",
            [](Group* g) { g->Pass(kHeartbeatTimeout, {}); },
            {"1: abort no message from rank 1 (node, pid 11) for 3s, the "
             "heartbeat timeout is 3s",
             "1 closed: UNAVAILABLE"},
            "rank 1 (node, pid 11); no message from rank 1 (node, pid 11) "
            "for 3s, the heartbeat timeout is 3s"},
           {"breaks the rules",
            [](Group* g) { g->SendHello(1, g->Hello(1)); },
            {"1: abort rank 1 (node, pid 11) sent RankHello after its "
             "RankHello",
             "1 closed: INVALID_ARGUMENT"},
            "rank 1 (node, pid 11); rank 1 (node, pid 11) sent RankHello after "
            "its RankHello"},
       }) {
    SCOPED_TRACE(each.name);
    Group group;
    group.Join(1);
    (void)group.Events();
    each.leave(&group);
    EXPECT_THAT(group.Done(), ::testing::ElementsAreArray(each.done));
    EXPECT_THAT(group.Events(), ElementsAre(each.events));
    EXPECT_EQ(group.state().phase(), Phase::kJoining);
    group.Link(5);
    group.SendHello(5, group.Hello(1));
    group.Join(2);
    EXPECT_EQ(group.state().phase(), Phase::kLoading);
  }
}

TEST(RankGroupStateTest,
     TheErrorForAJoinTimeoutNamesTheMissingRanksAndTheLastRefusal) {
  Group group = Group::Of(4, Phase::kJoining);
  group.Join(2);
  RankHello hello = group.Hello(1);
  hello.mutable_identity()->set_plan_id("other");
  group.Link(9);
  group.SendHello(9, hello);
  (void)group.Done();
  group.Pass(absl::Seconds(20), {2});
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
  EXPECT_THAT(
      group.state().status(),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               "rank 1, rank 3 did not join within 20s; the last refusal was: "
               "rank 1 "
               "(node, pid 11): WRONG_IDENTITY: plan_id is \"other\", the "
               "leader has \"plan\""));
  EXPECT_THAT(group.Done(), ElementsAre(HasSubstr("2: abort rank 1, rank 3"),
                                        "2 closed: DEADLINE_EXCEEDED"));
  group.Link(10);
  EXPECT_THAT(group.Done(),
              ElementsAre("10: TOO_LATE", "10 closed: FAILED_PRECONDITION"));
}

// ---------------------------------------------------------------------------
// Loading
// ---------------------------------------------------------------------------

TEST(RankGroupStateTest,
     OnceAllRanksAreReadyTheGroupStartsWithTheSmallestPageCountsOfAnyRank) {
  Group group = Group::Of(3, Phase::kLoading);
  RankReady ready = Ready({10, 3}, {0, 5});
  ready.set_weight_bytes(1234);
  ready.set_weight_tiles("two");
  group.SendReady(2, ready);
  EXPECT_THAT(group.Events(),
              ElementsAre("rank 2 (node, pid 12); 1234 bytes of weights, pages "
                          "10+3, host pages 0+5"));
  ready = Ready({8, 4}, {2, 9});
  ready.set_weight_tiles("leader's");
  group.state().OnReady(ready);
  EXPECT_THAT(group.Done(), IsEmpty());
  EXPECT_FALSE(group.state().TakeTiles().has_value());
  group.SendReady(1, Ready({9, 5}, {1, 6}));
  const auto tiles = group.state().TakeTiles();
  ASSERT_TRUE(tiles.has_value());
  EXPECT_THAT(*tiles, ElementsAre("leader's", "", "two"));
  EXPECT_FALSE(group.state().TakeTiles().has_value());
  // Combining the tiles may take longer than load_timeout, which applies only
  // until all ranks have loaded.
  group.Pass(absl::Seconds(40), {1, 2});
  EXPECT_THAT(group.Done(), IsEmpty());
  EXPECT_EQ(group.state().phase(), Phase::kLoading);
  group.state().OnCombined(CombinedIds{.weights_id = "w", .cache_id = "c"});
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
  EXPECT_THAT(group.Done(),
              ElementsAre("1: start w c 8,3/0,5", "2: start w c 8,3/0,5"));
  EXPECT_THAT(group.state().start().pages(), ElementsAre(8, 3));
}

TEST(RankGroupStateTest, TheGroupEndsIfTheLeaderFailsToCombineTheWeightTiles) {
  Group group = Group::Of(3, Phase::kLoading);
  group.state().OnReady(Ready({8}));
  for (const uint64_t link : {1u, 2u}) group.SendReady(link, Ready({8}));
  ASSERT_TRUE(group.state().TakeTiles().has_value());
  group.state().OnCombined(
      absl::DataLossError("rank 1 has read another tile 7"));
  EXPECT_THAT(
      group.state().status(),
      StatusIs(absl::StatusCode::kDataLoss, "rank 1 has read another tile 7"));
  EXPECT_THAT(group.Done(),
              ElementsAre("1: abort rank 1 has read another tile 7",
                          "1 closed: DATA_LOSS",
                          "2: abort rank 1 has read another tile 7",
                          "2 closed: DATA_LOSS"));
}

TEST(RankGroupStateTest,
     AGroupThatHasEndedDoesNotStartWhenItsWeightTilesAreCombined) {
  Group group = Group::Of(3, Phase::kLoading);
  group.state().OnReady(Ready({8}));
  for (const uint64_t link : {1u, 2u}) group.SendReady(link, Ready({8}));
  ASSERT_TRUE(group.state().TakeTiles().has_value());
  group.state().OnLost(1, absl::UnavailableError("reset"));
  (void)group.Done();
  group.state().OnCombined(CombinedIds());
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
  EXPECT_THAT(group.Done(), IsEmpty());
}

TEST(RankGroupStateTest, OnlyTheWeightTilesOfALoadingRankMayBeLong) {
  constexpr int64_t kShort = kMaxFollowerMessageBytes;
  Group group;
  group.Join(1);
  EXPECT_EQ(group.state().MaxMessageBytes(1), kShort);
  group.Link(9);
  EXPECT_EQ(group.state().MaxMessageBytes(9), kShort);
  group.Join(2);
  // Link 9 has not joined, and link 77 does not exist.
  EXPECT_EQ(group.state().MaxMessageBytes(9), kShort);
  EXPECT_EQ(group.state().MaxMessageBytes(77), kShort);
  EXPECT_EQ(group.state().MaxMessageBytes(1), kShort + kMaxReadyBytes);
  RankReady ready = Ready({8});
  ready.set_weight_tiles(std::string(kMaxReadyBytes, 't'));
  group.SendReady(1, ready);
  EXPECT_EQ(group.state().MaxMessageBytes(1), kShort);
  EXPECT_EQ(group.state().MaxMessageBytes(2), kShort + kMaxReadyBytes);
  KVASIR_EXPECT_OK(group.state().status());
  // Only the tiles of a RankReady may be long, not its other fields.
  ready = Ready(std::vector<int64_t>(kShort, 1));
  group.SendReady(2, ready);
  EXPECT_THAT(
      group.state().status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               absl::StrCat(
                   "rank 2 (node, pid 12) sent ", kShort + 8,
                   " bytes (not counting weight tiles), the limit is 65536")));
}

TEST(RankGroupStateTest, TheLeaderListsTheRanksThatHaveJoined) {
  Group group;
  RankHello hello = group.Hello(2);
  hello.set_host("\x1b[31m" + std::string(1000, 'h'));
  hello.set_metrics_address("node:9101");
  group.Link(5);
  group.SendHello(5, hello);
  const auto only = group.state().members();
  ASSERT_EQ(only.size(), 1u);
  EXPECT_EQ(only[0].rank, 2u);
  EXPECT_EQ(only[0].pid, 12u);
  EXPECT_EQ(only[0].metrics_address, "node:9101");
  EXPECT_THAT(only[0].host, ::testing::StartsWith("\\x1b[31mhhh"));
  EXPECT_LT(only[0].host.size(), 200u);
  EXPECT_FALSE(only[0].ready);
  group.Join(1);
  RankReady ready = Ready({8, 3}, {5, 6});
  ready.set_weight_bytes(1234);
  group.SendReady(1, ready);
  const auto both = group.state().members();
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].rank, 1u);
  EXPECT_TRUE(both[0].ready);
  EXPECT_THAT(both[0].pages, ElementsAre(8, 3));
  EXPECT_THAT(both[0].host_pages, ElementsAre(5, 6));
  EXPECT_EQ(both[0].weight_bytes, 1234);
  EXPECT_FALSE(both[1].ready);
  group.state().Abort(absl::InternalError("over"));
  EXPECT_THAT(group.state().members(), IsEmpty());
}

TEST(RankGroupStateTest, TheGroupEndsIfARanksPageCountsDoNotMatchTheLeaders) {
  struct Case {
    std::function<void(RankReady*)> change;
    absl::StatusCode code;
    std::string text;
  };
  const std::string name = "rank 2 (node, pid 12)";
  for (const Case& each : std::vector<Case>{
           {[](RankReady* r) { r->add_pages(3); },
            absl::StatusCode::kFailedPrecondition,
            name + " has pages in 2 page groups, the leader in 1"},
           {[](RankReady* r) { r->add_host_pages(3); },
            absl::StatusCode::kFailedPrecondition,
            name + " has host pages in 1 page groups, the leader in 0"},
           {[](RankReady* r) { r->set_pages(0, 0); },
            absl::StatusCode::kInvalidArgument,
            name + " has 0 pages in page group 0, but must have at least 1"},
       }) {
    SCOPED_TRACE(each.text);
    Group group = Group::Of(3, Phase::kLoading);
    RankReady ready = Ready({8});
    each.change(&ready);
    group.SendReady(2, ready);
    group.SendReady(1, Ready({8}));
    group.state().OnReady(Ready({8}));
    EXPECT_THAT(group.state().status(), StatusIs(each.code, each.text));
    EXPECT_FALSE(group.state().TakeTiles().has_value());
    // Both followers receive the reason, and their calls are closed.
    EXPECT_EQ(group.Done().size(), 4u);
  }
}

TEST(RankGroupStateTest, TheErrorNamesARankThatDoesNotLoadInTime) {
  Group group = Group::Of(3, Phase::kLoading);
  group.SendReady(2, Ready({8}));
  group.Pass(absl::Seconds(30), {1, 2});
  EXPECT_THAT(
      group.state().status(),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               "rank 0 (the leader), rank 1 (node, pid 11) did not load "
               "within 30s"));
}

TEST(RankGroupStateTest, AGroupThatIsCompleteRefusesFurtherRanks) {
  Group group = Group::Of(3, Phase::kRunning);
  group.Link(9);
  group.SendHello(9, group.Hello(1));
  EXPECT_THAT(group.Done(),
              ElementsAre("9: RANK_TAKEN", "9 closed: ALREADY_EXISTS"));
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
}

// ---------------------------------------------------------------------------
// Running
// ---------------------------------------------------------------------------

TEST(RankGroupStateTest, AStepIsDoneOnceAllRanksHaveReportedTheSameResult) {
  Group group = Group::Of(3, Phase::kRunning);
  KVASIR_EXPECT_OK(group.Step(1));
  KVASIR_EXPECT_OK(group.Step(2));
  EXPECT_THAT(group.Step(3), StatusIs(absl::StatusCode::kFailedPrecondition,
                                      "cannot send step 3 while step 1 has not "
                                      "ended: the limit is 2 steps in flight"));
  group.SendDone(1, 1, 77);
  group.SendDone(1, 2, 78);
  group.SendDone(2, 1, 77);
  EXPECT_FALSE(group.state().IsStepDone(1));
  group.state().OnStepDone(1, 77);
  EXPECT_TRUE(group.state().IsStepDone(1));
  EXPECT_FALSE(group.state().IsStepDone(2));
  group.state().OnStepDone(2, 78);
  group.SendDone(2, 2, 78);
  EXPECT_TRUE(group.state().IsStepDone(2));
  EXPECT_FALSE(group.state().IsStepDone(3));
  for (const uint64_t id : {0u, 2u, 4u}) {
    EXPECT_THAT(group.Step(id),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("step_id is ", id, ", but must be 3")));
  }
  KVASIR_EXPECT_OK(group.Step(3));
}

TEST(RankGroupStateTest,
     IfResultsOfRanksDifferTheGroupEndsWithAnErrorThatStatesBothHashes) {
  for (const bool leader_first : {false, true}) {
    Group group = Group::Of(3, Phase::kRunning);
    KVASIR_EXPECT_OK(group.Step(1));
    if (leader_first) group.state().OnStepDone(1, 0xabc);
    group.SendDone(2, 1, 0xdef);
    if (!leader_first) {
      EXPECT_EQ(group.state().phase(), Phase::kRunning);
      group.state().OnStepDone(1, 0xabc);
    }
    const std::string text =
        "step 1: the result of rank 2 (node, pid 12) has hash 0000000000000def,"
        " the leader's 0000000000000abc: the ranks computed different results";
    EXPECT_THAT(group.state().status(),
                StatusIs(absl::StatusCode::kInternal, text));
    EXPECT_FALSE(group.state().IsStepDone(1));
    EXPECT_THAT(group.Done(),
                ElementsAre("1: abort " + text, "1 closed: INTERNAL",
                            "2: abort " + text, "2 closed: INTERNAL"));
  }
}

struct BrokenRule {
  std::string name;
  Phase phase;
  std::function<void(Group*)> act;
  absl::StatusCode code;
  std::string text;
};

class BrokenRuleTest : public ::testing::TestWithParam<BrokenRule> {};

TEST_P(BrokenRuleTest, AllRanksGetTheReasonWhenAFaultEndsTheGroup) {
  Group group = Group::Of(3, GetParam().phase);
  GetParam().act(&group);
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
  EXPECT_THAT(group.state().status(),
              StatusIs(GetParam().code, GetParam().text));
  const std::string code(absl::StatusCodeToString(GetParam().code));
  const std::vector<std::string> done = group.Done();
  EXPECT_THAT(done, ::testing::Contains("2: abort " + GetParam().text));
  EXPECT_THAT(done, ::testing::Contains("2 closed: " + code));
  // After the end the leader sends nothing more.
  group.SendDone(2, 1, 5);
  group.Pass(absl::Seconds(5), {1, 2});
  group.state().Abort(absl::InternalError("late"));
  KVASIR_EXPECT_OK(group.state().Drain());
  EXPECT_THAT(group.Done(), IsEmpty());
  EXPECT_THAT(group.state().status(),
              StatusIs(GetParam().code, GetParam().text));
}

constexpr char kRank1[] = "rank 1 (node, pid 11)";

INSTANTIATE_TEST_SUITE_P(
    Rules, BrokenRuleTest,
    ::testing::ValuesIn(std::vector<BrokenRule>{
        {"LostWhileLoading", Phase::kLoading,
         [](Group* g) {
           g->state().OnLost(1, absl::UnavailableError("reset"));
         },
         absl::StatusCode::kUnavailable,
         absl::StrCat("the call of ", kRank1, " ended: reset")},
        {"Lost", Phase::kRunning,
         [](Group* g) { g->state().OnLost(1, absl::OkStatus()); },
         absl::StatusCode::kUnavailable,
         absl::StrCat("the call of ", kRank1, " ended: the follower left")},
        {"Silent", Phase::kRunning,
         [](Group* g) { g->Pass(kHeartbeatTimeout, {2}); },
         absl::StatusCode::kUnavailable,
         absl::StrCat("no message from ", kRank1,
                      " for 3s, the heartbeat timeout is 3s")},
        {"DoesNotRead", Phase::kRunning,
         [](Group* g) { g->state().OnBacklog(1, 17); },
         absl::StatusCode::kUnavailable,
         absl::StrCat(kRank1, " does not read its messages: 17 messages wait")},
        {"StandsStill", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           g->state().OnStepDone(1, 5);
           g->SendDone(2, 1, 5);
           g->Pass(absl::Seconds(10), {1, 2});
         },
         absl::StatusCode::kUnavailable,
         absl::StrCat(kRank1, " did not end step 1 within 10s")},
        {"AllStandStill", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           g->Pass(absl::Seconds(10), {1, 2});
         },
         absl::StatusCode::kUnavailable,
         absl::StrCat("rank 0 (the leader), ", kRank1,
                      ", rank 2 (node, pid 12) did not end step 1 within 10s")},
        {"Fails", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           g->SendDone(1, 1, 0, 8);
         },
         absl::StatusCode::kResourceExhausted,
         absl::StrCat(kRank1, " failed in step 1: no memory")},
        {"FailsWithAnInvalidStatusCode", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           g->SendDone(1, 1, 0, -7);
         },
         absl::StatusCode::kUnknown,
         absl::StrCat(kRank1, " failed in step 1: no memory")},
        {"GivesUp", Phase::kLoading,
         [](Group* g) {
           FollowerMessage message;
           message.mutable_abort()->set_code(5);
           message.mutable_abort()->set_reason("no\nfile");
           g->Send(1, message);
         },
         absl::StatusCode::kNotFound,
         absl::StrCat(kRank1, " gave up: no\\nfile")},
        {"EndsAStepThatItDoesNotHave", Phase::kRunning,
         [](Group* g) { g->SendDone(1, 1, 5); },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1,
                      " reported the end of step 1 but has no step to run")},
        {"EndsAStepBeforeTheGroupRuns", Phase::kLoading,
         [](Group* g) { g->SendDone(1, 1, 5); },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1,
                      " reported the end of step 1 but has no step to run")},
        {"EndsAStepTwice", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           KVASIR_EXPECT_OK(g->Step(2));
           g->SendDone(1, 1, 5);
           g->SendDone(1, 1, 5);
         },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1, " reported the end of step 1, expected step 2")},
        {"EndsTheSecondStepFirst", Phase::kRunning,
         [](Group* g) {
           KVASIR_EXPECT_OK(g->Step(1));
           KVASIR_EXPECT_OK(g->Step(2));
           g->SendDone(1, 2, 5);
         },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1, " reported the end of step 2, expected step 1")},
        {"IsReadyTwice", Phase::kLoading,
         [](Group* g) {
           g->SendReady(1, Ready({7}));
           g->SendReady(1, Ready({7}));
         },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1, " sent a RankReady for the second time")},
        {"SendsASecondHello", Phase::kRunning,
         [](Group* g) { g->SendHello(1, g->Hello(1)); },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1, " sent RankHello after its RankHello")},
        {"SendsAnEmptyMessage", Phase::kRunning,
         [](Group* g) { g->Send(1, FollowerMessage()); },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(
             kRank1, " sent a message of an unknown kind after its RankHello")},
        {"SendsGarbage", Phase::kRunning,
         [](Group* g) { g->state().OnGarbage(1, 9, absl::UnixEpoch()); },
         absl::StatusCode::kInvalidArgument,
         absl::StrCat(kRank1, " sent 9 bytes that are not a FollowerMessage")},
        {"TheLeaderFails", Phase::kRunning,
         [](Group* g) { g->state().Abort(absl::DataLossError("disk")); },
         absl::StatusCode::kDataLoss, "rank 0 (the leader) gave up: disk"},
    }),
    [](const auto& each) { return each.param.name; });

TEST(RankGroupStateTest, TheTimeoutOfTheNextStepStartsWhenTheStepBeforeItEnds) {
  Group group = Group::Of(2, Phase::kRunning);
  KVASIR_EXPECT_OK(group.Step(1));
  KVASIR_EXPECT_OK(group.Step(2));
  group.Pass(absl::Seconds(8), {1});
  group.state().OnStepDone(1, 5);
  group.SendDone(1, 1, 5);
  group.Pass(absl::Seconds(8), {1});
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
  group.Pass(absl::Seconds(2), {1});
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
}

TEST(RankGroupStateTest, AnyMessageOfARankCountsAsAHeartbeat) {
  Group group = Group::Of(2, Phase::kRunning);
  for (uint64_t step = 1; step <= 8; ++step) {
    group.Pass(absl::Seconds(2), {});
    KVASIR_EXPECT_OK(group.Step(step));
    group.state().OnStepDone(step, 5);
    group.SendDone(1, step, 5);
  }
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
}

TEST(RankGroupStateTest,
     TimeInWhichTheLeaderDidNotRunDoesNotCountAsSilenceOfARank) {
  Group group = Group::Of(2, Phase::kRunning);
  KVASIR_EXPECT_OK(group.Step(1));
  group.Jump(absl::Minutes(10));
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
  group.Pass(kHeartbeatTimeout - absl::Milliseconds(250), {});
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
  group.Pass(absl::Milliseconds(250), {});
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
}

TEST(RankGroupStateTest, TheLeaderSendsSixHeartbeatsInEachHeartbeatTimeout) {
  Group group;
  group.Join(1);
  group.Link(9);
  (void)group.state().TakeActions();
  group.Pass(absl::Seconds(2), {1});
  int heartbeats = 0;
  for (const RankGroupState::Action& action : group.state().TakeActions()) {
    EXPECT_EQ(action.link, 1u);
    heartbeats += action.message.has_heartbeat() ? 1 : 0;
  }
  EXPECT_EQ(heartbeats, 4);
}

TEST(RankGroupStateTest, ADrainEndsAllRanksWithTheStatusOk) {
  Group group = Group::Of(3, Phase::kRunning);
  KVASIR_EXPECT_OK(group.Step(1));
  EXPECT_THAT(
      group.state().Drain(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               "the tensor-parallel group cannot drain while step 1 runs"));
  for (const uint64_t link : {1u, 2u}) group.SendDone(link, 1, 5);
  group.state().OnStepDone(1, 5);
  group.Link(9);
  KVASIR_EXPECT_OK(group.state().Drain());
  EXPECT_THAT(group.Done(),
              ElementsAre("1: drain", "1 closed: OK", "2: drain",
                          "2 closed: OK", "9 closed: UNAVAILABLE"));
  EXPECT_EQ(group.state().phase(), Phase::kEnded);
  KVASIR_EXPECT_OK(group.state().status());
  group.state().OnLost(1, absl::OkStatus());
  group.Link(10);
  EXPECT_THAT(group.Done(),
              ElementsAre("10: TOO_LATE", "10 closed: FAILED_PRECONDITION"));
  EXPECT_THAT(group.Step(2),
              StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::_));
}

TEST(RankGroupStateTest, AFollowerMayAskTheLeaderForADrain) {
  Group group = Group::Of(2, Phase::kRunning);
  FollowerMessage message;
  message.mutable_drain();
  group.Send(1, message);
  const auto events = group.state().TakeEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, RankGroupState::Event::Kind::kDrainAsked);
  // A second request for a drain has no effect.
  group.Send(1, message);
  EXPECT_THAT(group.Events(), IsEmpty());
  EXPECT_EQ(group.state().phase(), Phase::kRunning);
}

}  // namespace
}  // namespace kvasir::worker
