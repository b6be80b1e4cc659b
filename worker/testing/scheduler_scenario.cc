#include "worker/testing/scheduler_scenario.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/string_view.h"
#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

using base::AbslView;

constexpr int kMaxSteps = 10000;

std::string ReasonName(kvasir::v1::FinishReason reason) {
  switch (reason) {
    case kvasir::v1::FINISH_STOP:
      return "stop";
    case kvasir::v1::FINISH_LENGTH:
      return "length";
    case kvasir::v1::FINISH_ABORT:
      return "abort";
    default:
      return "?";
  }
}

std::string RefusalName(kvasir::v1::Refusal::Reason reason) {
  switch (reason) {
    case kvasir::v1::Refusal::REFUSAL_UNSPECIFIED:
      return "none";
    case kvasir::v1::Refusal::RETRY_ELSEWHERE:
      return "retry";
    case kvasir::v1::Refusal::NEVER_FITS:
      return "never";
    case kvasir::v1::Refusal::DRAINING:
      return "draining";
    default:
      return "?";
  }
}

std::string SequenceName(const SequenceSnapshot& sequence) {
  if (sequence.sample_index == 0) return sequence.request_id;
  return absl::StrCat(sequence.request_id, "#", sequence.sample_index);
}

std::string Rest(const std::vector<std::string>& words, size_t from) {
  return absl::StrJoin(words.begin() + static_cast<std::ptrdiff_t>(from),
                       words.end(), " ");
}

}  // namespace

std::vector<int32_t> FakePrompt(std::string_view name, size_t num_tokens,
                                int32_t vocab_size) {
  uint32_t x = 2166136261u;
  for (char c : name) x = (x ^ static_cast<uint8_t>(c)) * 16777619u;
  std::vector<int32_t> ids;
  for (size_t i = 0; i < num_tokens; ++i) {
    x = x * 1664525u + 1013904223u;
    ids.push_back(
        static_cast<int32_t>((x >> 8) % static_cast<uint32_t>(vocab_size)));
  }
  return ids;
}

Scenario::Scenario() {
  options_.max_model_len = 64;
  options_.max_num_seqs = 4;
  options_.max_batched_tokens = 16;
  options_.max_queue = 8;
  options_.vocab_size = 1000;
  fake_.page_tokens = 4;
  fake_.groups = {{.num_pages = 16}};
}

std::string Scenario::Line::Argument(const std::string& key,
                                     const std::string& otherwise) const {
  const auto found = arguments.find(key);
  return found == arguments.end() ? otherwise : found->second;
}

int64_t Scenario::Line::Number(const std::string& key,
                               int64_t otherwise) const {
  const std::string text = Argument(key, absl::StrCat(otherwise));
  int64_t value = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << key << "=" << text;
  return value;
}

absl::Duration Scenario::Line::Time(const std::string& key,
                                    absl::Duration otherwise) const {
  const auto found = arguments.find(key);
  if (found == arguments.end()) return otherwise;
  absl::Duration value;
  EXPECT_TRUE(absl::ParseDuration(found->second, &value)) << found->second;
  return value;
}

Scenario::Line Scenario::Parse(std::string_view text) {
  Line line;
  // `#` begins a comment only after a space or at the beginning of a line.
  // Elsewhere it separates a request from its sample, as in a#1.
  std::string kept;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '#' && (i == 0 || text[i - 1] == ' ')) break;
    kept.push_back(text[i]);
  }
  for (absl::string_view word :
       absl::StrSplit(kept, ' ', absl::SkipWhitespace())) {
    line.words.emplace_back(word);
    const std::vector<std::string> pair =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (pair.size() == 2) line.arguments[pair[0]] = pair[1];
  }
  return line;
}

void Scenario::Run(std::string_view script) {
  int number = 0;
  for (absl::string_view text : absl::StrSplit(AbslView(script), '\n')) {
    ++number;
    const Line line = Parse(base::StdView(text));
    if (line.words.empty()) continue;
    SCOPED_TRACE(absl::StrCat("line ", number, ": ", text));
    RunLine(line);
    if (::testing::Test::HasFailure()) return;
  }
}

plan::EvictionCounts Scenario::EvictionOf(const Line& line) {
  return {.budget_tokens = line.Number("keep", 0),
          .every_tokens = line.Number("every", 0)};
}

FakeModelLimits Scenario::Limits() const {
  return {.vocab_size = options_.vocab_size,
          .max_model_len = options_.max_model_len,
          .eos_token_ids = options_.eos_token_ids,
          .eviction = options_.eviction};
}

void Scenario::RunLine(const Line& line) {
  const std::string& command = line.words[0];
  if (command == "pool") {
    fake_.page_tokens = static_cast<uint32_t>(line.Number("page_tokens", 4));
    fake_.groups[0].num_pages = static_cast<int32_t>(line.Number("pages", 16));
    fake_.groups[0].sliding_window =
        static_cast<uint32_t>(line.Number("window", 0));
    fake_.groups[0].side_pages = static_cast<int32_t>(line.Number("side", 0));
    fake_.groups[0].host_pages = static_cast<int32_t>(line.Number("host", 0));
    fake_.groups[0].eviction = EvictionOf(line);
    return;
  }
  if (command == "group") {
    fake_.groups.push_back(
        {.num_pages = static_cast<int32_t>(line.Number("pages", 16)),
         .sliding_window = static_cast<uint32_t>(line.Number("window", 0)),
         .host_pages = static_cast<int32_t>(line.Number("host", 0)),
         .eviction = EvictionOf(line)});
    return;
  }
  if (command == "options") {
    options_.max_num_seqs = static_cast<uint32_t>(line.Number("seqs", 4));
    options_.max_batched_tokens =
        static_cast<uint32_t>(line.Number("batch", 16));
    options_.max_queue = static_cast<uint32_t>(line.Number("queue", 8));
    options_.max_model_len = static_cast<uint32_t>(line.Number("len", 64));
    options_.copy_bytes_per_second = static_cast<double>(line.Number(
        "copy_rate", static_cast<int64_t>(kAssumedCopyBytesPerSecond)));
    options_.queue_timeout = line.Time("timeout", absl::InfiniteDuration());
    if (line.arguments.contains("eos")) {
      options_.eos_token_ids = {static_cast<int32_t>(line.Number("eos", 0))};
    }
    return;
  }
  if (scheduler_ == nullptr) Build();
  ASSERT_NE(scheduler_, nullptr);
  if (command == "submit") return Submit(line);
  if (command == "schedule") return Schedule();
  if (command == "ahead") return ScheduleAhead();
  if (command == "apply") return ExecuteAndApply();
  if (command == "expect") return Expect(line);
  if (command == "abort") {
    scheduler_->Abort(line.words.at(1), std::nullopt);
    return CheckInvariants();
  }
  if (command == "advance") {
    absl::Duration by;
    ASSERT_TRUE(absl::ParseDuration(line.words.at(1), &by));
    return clock_.Advance(by);
  }
  const bool run = command == "run";
  ASSERT_TRUE(run || command == "step")
      << "the language has no command \"" << command << "\"";
  int steps = run ? kMaxSteps : 1;
  if (line.words.size() > 1) {
    ASSERT_TRUE(absl::SimpleAtoi(line.words[1], &steps));
  }
  for (int i = 0; i < steps && !(run && !scheduler_->has_work()); ++i) {
    if (plan_ == nullptr) Schedule();
    ExecuteAndApply();
    if (::testing::Test::HasFailure()) return;
  }
  if (run) {
    ASSERT_FALSE(scheduler_->has_work())
        << "the scheduler still has work after the last step of `run`";
  }
}

void Scenario::Build() {
  fake_.max_num_seqs = options_.max_num_seqs;
  fake_.max_batched_tokens = options_.max_batched_tokens;
  fake_.vocab_size = options_.vocab_size;
  cache::KvCacheConfig config;
  config.page_tokens = fake_.page_tokens;
  config.cache_id = "test";
  for (const auto& group : fake_.groups) {
    config.groups.push_back({.num_pages = group.num_pages,
                             .sliding_window = group.sliding_window,
                             .side_pages_per_sequence = group.side_pages,
                             .eviction = group.eviction,
                             .page_bytes = 128,
                             .payload_bytes = 128,
                             .num_host_pages = group.host_pages});
    config.prefix_reuse = config.prefix_reuse && !group.eviction.evicts();
    options_.eviction.groups.push_back(
        {.pages = {.eviction = group.eviction}, .least_slots = 1});
  }
  cache_ = std::make_unique<cache::KvCache>(config);
  executor_ = std::make_unique<FakeExecutor>(fake_);
  auto scheduler =
      Scheduler::Create(options_, {.cache = cache_.get(), .clock = &clock_});
  ASSERT_TRUE(scheduler.ok()) << scheduler.status();
  scheduler_ = *std::move(scheduler);
}

void Scenario::Submit(const Line& line) {
  const std::string& name = line.words.at(1);
  Submitted& entry = submitted_[name];
  Request request;
  request.request_id = name;
  request.attempt = static_cast<uint32_t>(line.Number("attempt", 0));
  request.cache_salt = line.Argument("salt", "");
  request.prompt = proto::TokenBytes::Adopt(FakePrompt(
      line.Argument("text", name),
      static_cast<size_t>(line.Number("prompt", 4)), options_.vocab_size));
  request.priority = static_cast<int32_t>(line.Number("prio", 0));
  if (line.arguments.contains("budget")) {
    const auto budget = proto::ParseEvictionBudget(line.Argument("budget", ""));
    ASSERT_TRUE(budget.ok()) << budget.status();
    request.eviction_budget = *budget;
  }
  request.queue_timeout = line.Time("queue_timeout", absl::ZeroDuration());
  if (line.arguments.contains("deadline")) {
    request.deadline =
        clock_.Now() + line.Time("deadline", absl::ZeroDuration());
  }
  kvasir::v1::SamplingParams& sampling = request.sampling;
  sampling.set_n(static_cast<uint32_t>(line.Number("n", 1)));
  sampling.set_max_tokens(static_cast<uint32_t>(line.Number("max", 4)));
  sampling.set_min_tokens(static_cast<uint32_t>(line.Number("min", 0)));
  sampling.set_temperature(static_cast<float>(line.Number("temp", 0)));
  sampling.set_seed(static_cast<uint64_t>(line.Number("seed", 0)));
  if (line.arguments.contains("logprobs")) {
    sampling.set_logprobs(static_cast<uint32_t>(line.Number("logprobs", 0)));
  }
  if (line.arguments.contains("stop")) {
    sampling.add_stop_token_ids(static_cast<int32_t>(line.Number("stop", 0)));
  }
  const auto has = [&](const char* flag) {
    return std::find(line.words.begin(), line.words.end(), flag) !=
           line.words.end();
  };
  if (has("penalties")) {
    sampling.set_repetition_penalty(1.5f);
    sampling.set_frequency_penalty(0.5f);
  }
  if (has("prompt_logprobs")) sampling.set_prompt_logprobs(0);
  sampling.set_ignore_eos(has("ignore_eos"));
  if (const int64_t emitted = line.Number("emitted", 0); emitted > 0) {
    // The `emitted` ids of a resumed request: the beginning of the output of an
    // uninterrupted run.
    std::vector<int32_t> ids = FakeContinuation(request, 0, Limits());
    ASSERT_GE(static_cast<int64_t>(ids.size()), emitted);
    ids.resize(static_cast<size_t>(emitted));
    request.emitted = proto::TokenBytes::Adopt(std::move(ids));
  }
  entry.request = request;
  entry.sink = std::make_shared<RecordingSink>(sampling.n());
  entry.refusal = scheduler_->Add(std::move(request), entry.sink);
}

void Scenario::Schedule() {
  ASSERT_EQ(plan_, nullptr) << "the last plan has not been applied";
  plan_ = scheduler_->Schedule();
  NamePlan(plan_);
}

void Scenario::ScheduleAhead() {
  ASSERT_NE(plan_, nullptr) << "`ahead` needs a plan that has not been applied";
  ASSERT_EQ(ahead_, nullptr) << "a step has already been planned ahead";
  ahead_ = scheduler_->ScheduleAhead();
  NamePlan(ahead_);
}

void Scenario::NamePlan(const kvasir::v1::StepPlan* plan) {
  last_plan_.clear();
  if (plan == nullptr) return;
  std::map<uint64_t, std::string> names;
  for (const SequenceSnapshot& sequence : scheduler_->Snapshot()) {
    if (sequence.running) names[sequence.sequence_id] = SequenceName(sequence);
  }
  for (const auto& step : plan->sequences()) {
    absl::StrAppend(&last_plan_, last_plan_.empty() ? "" : " ",
                    names[step.sequence_id()], ":", step.num_tokens());
  }
}

void Scenario::ExecuteAndApply() {
  if (plan_ == nullptr) return;
  if (!plan_runs_) {
    const absl::Status enqueued = executor_->Enqueue(*plan_);
    ASSERT_TRUE(enqueued.ok()) << enqueued;
  }
  const auto result = executor_->Await();
  ASSERT_TRUE(result.ok()) << result.status();
  plan_ = std::exchange(ahead_, nullptr);
  plan_runs_ = plan_ != nullptr;
  if (plan_runs_) {
    const absl::Status enqueued = executor_->Enqueue(*plan_);
    ASSERT_TRUE(enqueued.ok()) << enqueued;
  }
  const absl::Status applied = scheduler_->Apply(*result);
  ASSERT_TRUE(applied.ok()) << applied;
  CheckInvariants();
}

void Scenario::CheckInvariants() {
  const absl::Status status = cache_->CheckInvariants();
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(cache_->Stats().leaked_pages, 0);
}

int64_t Scenario::HostPages() const {
  int64_t pages = 0;
  for (const auto& group : cache_->Stats().groups) {
    pages += group.host_used_pages;
  }
  return pages;
}

std::string Scenario::Names(bool running) const {
  std::vector<std::string> names;
  for (const SequenceSnapshot& sequence : scheduler_->Snapshot()) {
    if (sequence.running == running) names.push_back(SequenceName(sequence));
  }
  return names.empty() ? "none" : absl::StrJoin(names, " ");
}

const Scenario::Submitted& Scenario::Of(const std::string& name) const {
  const auto found = submitted_.find(name);
  if (found == submitted_.end()) {
    static const Submitted kNone{.request = {},
                                 .sink = std::make_shared<RecordingSink>(),
                                 .refusal = {}};
    ADD_FAILURE() << "the script submitted no request named " << name;
    return kNone;
  }
  return found->second;
}

void Scenario::Expect(const Line& line) {
  const std::string& what = line.words.at(1);
  const std::string rest = Rest(line.words, 2);
  if (what == "running") {
    EXPECT_EQ(Names(true), rest);
  } else if (what == "waiting") {
    EXPECT_EQ(Names(false), rest);
  } else if (what == "plan") {
    EXPECT_EQ(last_plan_.empty() ? "none" : last_plan_, rest);
  } else if (what == "free") {
    EXPECT_EQ(absl::StrCat(scheduler_->Load().free_pages), rest);
  } else if (what == "host") {
    EXPECT_EQ(absl::StrCat(HostPages()), rest);
  } else if (what == "moved") {
    EXPECT_EQ(absl::StrCat(executor_->pages_to_host(), " ",
                           executor_->pages_from_host()),
              rest);
  } else if (what == "tails") {
    int64_t pages = 0;
    for (const auto& group : cache_->Stats().groups) pages += group.tail_pages;
    EXPECT_EQ(absl::StrCat(pages), rest);
  } else if (what == "evicted") {
    EXPECT_EQ(absl::StrCat(cache_->Stats().slots_evicted), rest);
  } else if (what == "finished" || what == "failed") {
    ExpectEnds(line);
  } else if (what == "refused") {
    ExpectRefused(line);
  } else if (what == "output") {
    for (size_t i = 2; i < line.words.size(); ++i) ExpectOutput(line.words[i]);
  } else if (what == "tokens") {
    EXPECT_EQ(
        absl::StrCat(Of(line.words.at(2)).sink->samples().at(0).tokens.size()),
        line.words.at(3));
  } else if (what == "cached" || what == "preempted") {
    const auto& finish = Of(line.words.at(2)).sink->samples().at(0).finish;
    ASSERT_TRUE(finish.has_value());
    EXPECT_EQ(absl::StrCat(what == "cached" ? finish->cached_tokens()
                                            : finish->preemptions()),
              line.words.at(3));
  } else if (what == "idle") {
    EXPECT_FALSE(scheduler_->has_work());
    EXPECT_EQ(scheduler_->num_queued(), 0u);
    EXPECT_EQ(scheduler_->Load().queued_tokens, 0u);
    EXPECT_EQ(scheduler_->Load().free_pages, scheduler_->Load().total_pages);
    EXPECT_EQ(cache_->Stats().sequences, 0);
    EXPECT_EQ(HostPages(), 0);
  } else {
    FAIL() << "the language has no expectation \"" << what << "\"";
  }
}

void Scenario::ExpectEnds(const Line& line) {
  for (const auto& [name, how] : line.arguments) {
    const RecordingSink& sink = *Of(name).sink;
    if (line.words[1] == "failed") {
      ASSERT_TRUE(sink.failed().has_value()) << name;
      EXPECT_EQ(absl::StatusCodeToString(sink.failed()->status.code()), how);
      continue;
    }
    EXPECT_FALSE(sink.failed().has_value()) << name;
    for (const auto& sample : sink.samples()) {
      ASSERT_TRUE(sample.finish.has_value()) << name;
      EXPECT_EQ(ReasonName(sample.finish->reason()), how) << name;
    }
  }
}

void Scenario::ExpectRefused(const Line& line) {
  for (const auto& [name, how] : line.arguments) {
    const Submitted& entry = Of(name);
    EXPECT_EQ(
        absl::StrCat(absl::StatusCodeToString(entry.refusal.status.code()), "/",
                     RefusalName(entry.refusal.reason)),
        how);
    EXPECT_FALSE(entry.sink->accepted());
  }
}

void Scenario::ExpectOutput(const std::string& name) {
  const Submitted& entry = Of(name);
  for (uint32_t i = 0; i < entry.request.sampling.n(); ++i) {
    EXPECT_EQ(entry.sink->samples()[i].tokens,
              FakeContinuation(entry.request, i, Limits()))
        << name << "#" << i;
  }
}

}  // namespace kvasir::worker
