#include "worker/service/generate_stream.h"

#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/status_matchers.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = StreamAction::Kind;

constexpr size_t kAmple = 1 << 20;

kvasir::v1::GenerateEvent::Tokens TokensOf(uint32_t index,
                                           const std::vector<int32_t>& ids) {
  kvasir::v1::GenerateEvent::Tokens tokens;
  tokens.set_index(index);
  tokens.mutable_token_ids()->Add(ids.begin(), ids.end());
  return tokens;
}

void Tokens(GenerateStream* stream, uint32_t index, std::vector<int32_t> ids) {
  stream->OnTokens(TokensOf(index, ids));
}

void Finish(GenerateStream* stream, uint32_t index, bool last) {
  kvasir::v1::GenerateEvent::Finish finish;
  finish.set_index(index);
  stream->OnFinished(finish, last);
}

Kind NextKind(GenerateStream* stream) {
  const std::optional<StreamAction> action = stream->Next();
  EXPECT_TRUE(action.has_value());
  return action.has_value() ? action->kind : Kind::kReset;
}

std::vector<int32_t> NextIds(GenerateStream* stream) {
  const std::optional<StreamAction> action = stream->Next();
  EXPECT_TRUE(action.has_value() && action->event.has_tokens());
  if (!action.has_value()) return {};
  return {action->event.tokens().token_ids().begin(),
          action->event.tokens().token_ids().end()};
}

TEST(GenerateStreamTest, AStreamHasAtMostOneWriteInFlight) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  stream.OnAccepted(3);
  Tokens(&stream, 0, {1});
  EXPECT_TRUE(stream.Next()->event.has_accepted());
  EXPECT_FALSE(stream.Next().has_value());
  stream.OnWriteDone(true);
  EXPECT_THAT(NextIds(&stream), ElementsAre(1));
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest, QueuedTokensOfASampleAreMergedIntoOneEvent) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  EXPECT_THAT(NextIds(&stream), ElementsAre(1));
  Tokens(&stream, 0, {2});
  Tokens(&stream, 1, {9});
  Tokens(&stream, 0, {3});
  stream.OnWriteDone(true);
  EXPECT_THAT(NextIds(&stream), ElementsAre(2, 3));
  stream.OnWriteDone(true);
  EXPECT_THAT(NextIds(&stream), ElementsAre(9));
}

TEST(GenerateStreamTest, QueuedTokensKeepTheirLogProbabilities) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 1, {1});
  EXPECT_THAT(NextIds(&stream), ElementsAre(1));
  kvasir::v1::GenerateEvent::Tokens tokens = TokensOf(1, {4, 5});
  kvasir::v1::TokenLogprob* logprob = tokens.add_logprobs();
  logprob->set_logprob(-0.5f);
  logprob->add_top()->set_token_id(4);
  tokens.add_logprobs()->set_logprob(-0.25f);
  stream.OnTokens(tokens);
  tokens.add_prompt_logprobs()->set_logprob(-1.0f);
  stream.OnTokens(tokens);
  stream.OnWriteDone(true);
  const kvasir::v1::GenerateEvent::Tokens sent = stream.Next()->event.tokens();
  EXPECT_EQ(sent.index(), 1u);
  EXPECT_THAT(sent.token_ids(), ElementsAre(4, 5, 4, 5));
  ASSERT_EQ(sent.logprobs_size(), 4);
  EXPECT_EQ(sent.logprobs(2).top(0).token_id(), 4);
  EXPECT_EQ(sent.logprobs(3).logprob(), -0.25f);
  ASSERT_EQ(sent.prompt_logprobs_size(), 1);
  EXPECT_EQ(sent.prompt_logprobs(0).logprob(), -1.0f);
}

TEST(GenerateStreamTest,
     TheLastEventIsWrittenTogetherWithTheStatusThatEndsTheCall) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  Finish(&stream, 0, true);
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  stream.OnWriteDone(true);
  const std::optional<StreamAction> last = stream.Next();
  EXPECT_EQ(last->kind, Kind::kWriteAndFinish);
  EXPECT_TRUE(last->event.has_finish());
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest, TheCallContinuesUntilAllSamplesOfTheRequestHaveEnded) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Finish(&stream, 1, false);
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  stream.OnWriteDone(true);
  EXPECT_FALSE(stream.Next().has_value());
  Finish(&stream, 0, true);
  EXPECT_EQ(NextKind(&stream), Kind::kWriteAndFinish);
}

TEST(GenerateStreamTest, ARefusedRequestEndsTheCallWithTheReasonOfTheRefusal) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({absl::ResourceExhaustedError("64 requests wait"),
                      kvasir::v1::Refusal::RETRY_ELSEWHERE});
  const std::optional<StreamAction> end = stream.Next();
  EXPECT_EQ(end->kind, Kind::kFinish);
  EXPECT_EQ(end->end.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
  EXPECT_THAT(end->end.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                        "64 requests wait"));
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest, QueuedTokensAreSentBeforeTheErrorOfARequest) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  stream.OnFailed({absl::InternalError("rank 1 is lost"),
                   kvasir::v1::Refusal::RETRY_ELSEWHERE});
  EXPECT_THAT(NextIds(&stream), ElementsAre(1));
  stream.OnWriteDone(true);
  const std::optional<StreamAction> end = stream.Next();
  EXPECT_EQ(end->kind, Kind::kFinish);
  EXPECT_THAT(end->end.status,
              StatusIs(absl::StatusCode::kInternal, "rank 1 is lost"));
}

TEST(GenerateStreamTest, ACancelledCallAbortsItsRequestAndEndsOnce) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  stream.OnCancel();
  EXPECT_EQ(NextKind(&stream), Kind::kAbort);
  EXPECT_EQ(NextKind(&stream), Kind::kFinish);
  stream.OnCancel();
  Finish(&stream, 0, true);
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest, ACancelledCallEndsOnlyAfterItsWriteInFlight) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  stream.OnCancel();
  EXPECT_EQ(NextKind(&stream), Kind::kAbort);
  EXPECT_FALSE(stream.Next().has_value());
  stream.OnWriteDone(false);
  EXPECT_EQ(NextKind(&stream), Kind::kFinish);
}

TEST(GenerateStreamTest,
     ARequestThatIsCancelledDuringSubmitIsAbortedAfterSubmitReturns) {
  GenerateStream stream(kAmple);
  stream.OnCancel();
  EXPECT_EQ(NextKind(&stream), Kind::kFinish);
  EXPECT_FALSE(stream.Next().has_value());
  stream.OnSubmitted({});
  EXPECT_EQ(NextKind(&stream), Kind::kAbort);
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest, ARefusedRequestIsNeverAborted) {
  // A refused request must not be aborted, because the abort could end a
  // request of another call that has the same id.
  GenerateStream stream(kAmple);
  stream.OnCancel();
  stream.OnSubmitted({absl::AlreadyExistsError("request r"),
                      kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
  EXPECT_EQ(NextKind(&stream), Kind::kFinish);
  EXPECT_FALSE(stream.Next().has_value());
}

TEST(GenerateStreamTest,
     TheCallOfAClientThatReadsTooSlowlyIsResetAndItsRequestAborted) {
  GenerateStream stream(200);
  stream.OnSubmitted({});
  Tokens(&stream, 0, {1});
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  for (int32_t id = 0; id < 100; ++id) Tokens(&stream, 0, {id});
  EXPECT_EQ(NextKind(&stream), Kind::kAbort);
  EXPECT_EQ(NextKind(&stream), Kind::kReset);
  EXPECT_FALSE(stream.Next().has_value());
  EXPECT_EQ(stream.queued_bytes(), 0u);
  stream.OnWriteDone(false);
  const std::optional<StreamAction> end = stream.Next();
  EXPECT_EQ(end->kind, Kind::kFinish);
  EXPECT_THAT(end->end.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                        HasSubstr("the limit is 200")));
}

TEST(GenerateStreamTest, QueuedBytesAreZeroOnceAllEventsAreTaken) {
  GenerateStream stream(kAmple);
  stream.OnSubmitted({});
  stream.OnAccepted(1);
  Tokens(&stream, 0, {1, 2, 3});
  EXPECT_GT(stream.queued_bytes(), 0u);
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  stream.OnWriteDone(true);
  EXPECT_EQ(NextKind(&stream), Kind::kWrite);
  EXPECT_EQ(stream.queued_bytes(), 0u);
}

// Drives one GenerateStream with random events of engine and transport, and
// checks the guarantees that generate_stream.h gives.
class Storm {
 public:
  explicit Storm(uint32_t seed)
      : random_(seed), stream_(Chance(8) ? 300 : kAmple) {
    num_samples_ = 1 + Draw(3);
    for (uint32_t i = 0; i < num_samples_; ++i) left_[i] = Draw(20);
    may_cancel_ = Chance(2);
    refused_ = Chance(10);
  }

  void Run() {
    for (int steps = 0; !Over(); ++steps) {
      ASSERT_LT(steps, 100000) << "the stream never ends";
      Step();
      while (std::optional<StreamAction> action = stream_.Next()) {
        Carry(*action);
      }
    }
    EXPECT_EQ(finishes_, 1);
    EXPECT_LE(aborts_, 1);
    if (refused_) {
      EXPECT_EQ(aborts_, 0);
    }
    if (lost_ || refused_ || failed_) return;
    EXPECT_EQ(aborts_, 0);
    EXPECT_EQ(read_, sent_);
    EXPECT_EQ(read_finishes_, num_samples_);
  }

 private:
  uint32_t Draw(uint32_t below) {
    return static_cast<uint32_t>(random_()) % below;
  }
  bool Chance(uint32_t one_in) { return Draw(one_in) == 0; }

  // Whether both the call and the engine's work on the request have ended.
  bool Over() const {
    return submitted_ && finishes_ == 1 && (refused_ || engine_ended_);
  }

  void Step() {
    if (!submitted_ && Chance(3)) {
      submitted_ = true;
      stream_.OnSubmitted(
          refused_ ? Refusal{absl::AlreadyExistsError("r"),
                             kvasir::v1::Refusal::REFUSAL_UNSPECIFIED}
                   : Refusal{});
    } else if (in_flight_ && Chance(2)) {
      in_flight_ = false;
      const bool ok = !lost_ && !Chance(50);
      if (!ok) lost_ = true;
      stream_.OnWriteDone(ok);
    } else if (may_cancel_ && finishes_ == 0 && Chance(30)) {
      lost_ = true;
      stream_.OnCancel();
    } else if (!engine_ended_ && !refused_) {
      EngineStep();
    }
  }

  // Sends the next event of the engine. The engine may do that before Submit
  // has returned.
  void EngineStep() {
    if (!accepted_) {
      accepted_ = true;
      stream_.OnAccepted(7);
      return;
    }
    if (Chance(200)) {
      engine_ended_ = failed_ = true;
      stream_.OnFailed({absl::InternalError("broken"),
                        kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
      return;
    }
    const uint32_t index = Draw(num_samples_);
    const auto sample = left_.find(index);
    if (sample == left_.end()) return;
    if (sample->second > 0 && aborts_ == 0) {
      --sample->second;
      const auto id = static_cast<int32_t>(Draw(1000));
      sent_[index].push_back(id);
      Tokens(&stream_, index, {id});
      return;
    }
    left_.erase(sample);
    engine_ended_ = left_.empty();
    Finish(&stream_, index, engine_ended_);
  }

  void Carry(const StreamAction& action) {
    switch (action.kind) {
      case Kind::kWrite:
      case Kind::kWriteAndFinish:
        ASSERT_FALSE(in_flight_);
        ASSERT_EQ(finishes_, 0);
        in_flight_ = action.kind == Kind::kWrite;
        finishes_ += action.kind == Kind::kWriteAndFinish;
        Read(action.event);
        break;
      case Kind::kFinish:
        ASSERT_FALSE(in_flight_);
        ASSERT_EQ(finishes_, 0);
        ++finishes_;
        break;
      case Kind::kReset:
        ASSERT_TRUE(in_flight_);
        ASSERT_EQ(finishes_, 0);
        lost_ = true;
        break;
      case Kind::kAbort:
        ASSERT_TRUE(submitted_);
        ASSERT_FALSE(engine_ended_);
        ++aborts_;
        lost_ = true;
        break;
    }
  }

  void Read(const kvasir::v1::GenerateEvent& event) {
    if (event.has_finish()) ++read_finishes_;
    if (!event.has_tokens()) return;
    for (const int32_t id : event.tokens().token_ids()) {
      read_[event.tokens().index()].push_back(id);
    }
  }

  std::mt19937 random_;
  GenerateStream stream_;
  uint32_t num_samples_ = 1;
  std::map<uint32_t, uint32_t> left_;
  bool may_cancel_ = false;
  bool refused_ = false;
  bool submitted_ = false;
  bool accepted_ = false;
  bool engine_ended_ = false;
  bool failed_ = false;
  bool in_flight_ = false;
  bool lost_ = false;
  int finishes_ = 0;
  int aborts_ = 0;
  uint32_t read_finishes_ = 0;
  std::map<uint32_t, std::vector<int32_t>> sent_;
  std::map<uint32_t, std::vector<int32_t>> read_;
};

TEST(GenerateStreamTest, TheGuaranteesOfAStreamHoldForEveryOrderOfEvents) {
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE(seed);
    Storm(seed).Run();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kvasir::worker
