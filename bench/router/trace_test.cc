#include "bench/router/trace.h"

#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::bench {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::vector<uint64_t> PagesOf(const Trace& trace, size_t request,
                              bool output = false) {
  std::vector<uint64_t> pages;
  trace.PagesOf(request, output, &pages);
  return pages;
}

TEST(TraceTest, EverySyntheticTraceHasTheRequestedRateAndOrder) {
  for (const char* name : kTraceNames) {
    TraceOptions options;
    options.requests = 20000;
    options.prompt_tokens_per_s = 10000;
    KVASIR_ASSERT_OK_AND_ASSIGN(const Trace trace, MakeTrace(name, options));
    EXPECT_NEAR(static_cast<double>(trace.requests.size()), 20000, 2000);
    double tokens = 0;
    double last_s = 0;
    for (const TraceRequest& request : trace.requests) {
      EXPECT_GE(request.arrival_s, last_s);
      EXPECT_GE(request.prompt_tokens, 1u);
      last_s = request.arrival_s;
      tokens += request.prompt_tokens;
    }
    EXPECT_NEAR(tokens / last_s, 10000, 1000) << name;
  }
}

TEST(TraceTest, ATurnBeginsWithThePagesOfTheTurnBeforeAndItsAnswer) {
  TraceOptions options;
  options.requests = 2000;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Trace trace, MakeTrace("chat", options));
  size_t compared = 0;
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    for (size_t j = i + 1; j < trace.requests.size(); ++j) {
      if (trace.requests[j].session != trace.requests[i].session) continue;
      const std::vector<uint64_t> before = PagesOf(trace, i, /*output=*/true);
      std::vector<uint64_t> after = PagesOf(trace, j);
      ASSERT_GE(after.size(), before.size());
      after.resize(before.size());
      ASSERT_THAT(after, ElementsAreArray(before));
      ++compared;
      break;
    }
  }
  EXPECT_GT(compared, 1000u);
}

TEST(TraceTest, AnUnknownNameIsRefusedWithTheKnownOnes) {
  EXPECT_THAT(MakeTrace("chats", {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("few_shot, independent, hot")));
}

TEST(TraceTest, ReadsPagesAndTokensFromAFile) {
  const base::TempFolder folder;
  const std::string path = folder.Write(
      "trace.jsonl",
      R"({"timestamp": 0, "input_length": 9, "output_length": 5, )"
      R"("hash_ids": [7, 8, 9]})"
      "\n\n"
      R"({"timestamp": 1500, "input_length": 12, "output_length": 1, )"
      R"("hash_ids": [7, 8, 3], "session_id": "a"})"
      "\n"
      R"({"timestamp": 1500, "output_length": 1, "token_ids": )"
      R"([1, 2, 3, 4, 5, 6, 7, 8]})"
      "\n"
      R"({"timestamp": 1501, "output_length": 1, "token_ids": )"
      R"([1, 2, 3, 4, 9, 9, 9, 9, 9]})"
      "\n");
  KVASIR_ASSERT_OK_AND_ASSIGN(const Trace trace, ReadTrace(path, 4));
  ASSERT_THAT(trace.requests, SizeIs(4));
  EXPECT_EQ(trace.requests[1].arrival_s, 1.5);
  EXPECT_EQ(trace.requests[0].session, 0u);
  EXPECT_NE(trace.requests[1].session, 0u);
  // The third page of the first prompt is not full.
  ASSERT_THAT(PagesOf(trace, 0), SizeIs(2));
  ASSERT_THAT(PagesOf(trace, 1), SizeIs(3));
  EXPECT_EQ(PagesOf(trace, 0)[1], PagesOf(trace, 1)[1]);
  EXPECT_EQ(trace.requests[3].prompt_tokens, 9u);
  ASSERT_THAT(PagesOf(trace, 3), SizeIs(2));
  EXPECT_EQ(PagesOf(trace, 2)[0], PagesOf(trace, 3)[0]);
  EXPECT_NE(PagesOf(trace, 2)[1], PagesOf(trace, 3)[1]);
}

TEST(TraceTest, AWrongLineIsNamedByItsNumber) {
  const base::TempFolder folder;
  const std::string good =
      R"({"timestamp": 10, "input_length": 4, "output_length": 5, )"
      R"("hash_ids": [7]})"
      "\n";
  const auto refuses = [&](const std::string& line, const char* what) {
    EXPECT_THAT(ReadTrace(folder.Write("trace.jsonl", good + line), 4),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("line 2"), HasSubstr(what))));
  };
  refuses("{", "parse error");
  refuses(R"({"timestamp": 20})", "output_length");
  refuses(R"({"timestamp": 9, "input_length": 4, "output_length": 5, )"
          R"("hash_ids": [7]})",
          "before the one above");
  refuses(R"({"timestamp": 20, "input_length": 8, "output_length": 5, )"
          R"("hash_ids": [7]})",
          "only 1 hash_ids");
  refuses(R"({"timestamp": 20, "output_length": 5, "token_ids": []})",
          "the prompt is empty");
  EXPECT_THAT(
      ReadTrace(folder.Write("trace.jsonl", ""), 4),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no requests")));
  EXPECT_THAT(ReadTrace("/nowhere", 4),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere")));
}

}  // namespace
}  // namespace kvasir::bench
