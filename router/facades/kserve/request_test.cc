#include "router/facades/kserve/request.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/kserve/tensors.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotBuilt = absl::StatusCode::kUnimplemented;

absl::StatusOr<KserveRequest> Parse(const InferRequestBuilder& builder,
                                    bool unary = false) {
  return ParseKserveRequest(builder.Build(), unary);
}

// Parses a request in the vLLM schema with these sampling parameters.
absl::StatusOr<KserveRequest> ParseJson(const std::string& json) {
  return Parse(InferRequestBuilder()
                   .Text("text_input", "hi")
                   .Text("sampling_parameters", json));
}

InferRequestBuilder TrtText() {
  InferRequestBuilder builder;
  builder.Text("text_input", "hi", {1, 1}).Int("max_tokens", 5, {1, 1});
  return builder;
}

InferRequestBuilder TrtTokens() {
  InferRequestBuilder builder;
  builder.Numbers<int32_t>("input_ids", "INT32", {1, 3}, {7, 8, 9})
      .Int("input_lengths", 3, {1, 1})
      .Int("request_output_len", 4, {1, 1});
  return builder;
}

// Regression test: a request with sixty thousand tensors once blocked all
// clients, because each name was compared with all earlier ones.
TEST(KserveRequestTest, MoreThan64TensorsOutputsOrParametersAreRefused) {
  InferRequestBuilder inputs;
  InferRequestBuilder outputs;
  InferRequestBuilder parameters;
  for (int i = 0; i <= kMaxKserveNames; ++i) {
    // All tensors have the same name and no data. If a tensor were checked
    // before the number of tensors, the error would be another one.
    inputs.Raw("same", "NONE", {-1}, "");
    outputs.Output(absl::StrCat(i));
    parameters.Parameter(absl::StrCat(i));
  }
  const auto too_many = [](const char* what) {
    return StatusIs(kInvalid, AllOf(HasSubstr(what), HasSubstr("at most 64"),
                                    HasSubstr("have 65")));
  };
  EXPECT_THAT(Parse(inputs), too_many("inputs"));
  EXPECT_THAT(Parse(outputs), too_many("outputs"));
  EXPECT_THAT(Parse(parameters), too_many("parameters"));
}

TEST(KserveRequestTest, TheNumberOfBadWordsIsLimited) {
  const std::vector<std::string> words(kMaxBadWords + 1, "no");
  EXPECT_THAT(Parse(TrtText().Strings("bad_words", words,
                                      {static_cast<int64_t>(words.size())})),
              StatusIs(kInvalid, AllOf(HasSubstr("bad_words"),
                                       HasSubstr("1024"), HasSubstr("1025"))));
}

TEST(KserveRequestTest, TheTensorsOfARequestDetermineItsSchema) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest vllm,
      Parse(InferRequestBuilder().Text("text_input", "hi")));
  EXPECT_EQ(vllm.schema, KserveSchema::kVllmText);
  EXPECT_EQ(vllm.text, "hi");
  EXPECT_EQ(vllm.sampling.max_tokens(), 0u);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest text, Parse(TrtText()));
  EXPECT_EQ(text.schema, KserveSchema::kTrtText);
  EXPECT_EQ(text.sampling.max_tokens(), 5u);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest tokens, Parse(TrtTokens()));
  EXPECT_EQ(tokens.schema, KserveSchema::kTrtTokens);
  EXPECT_THAT(tokens.token_ids.ToIds(), ElementsAre(7, 8, 9));
}

TEST(KserveRequestTest, ARequestMustHaveTheTensorsOfExactlyOneSchema) {
  EXPECT_THAT(Parse(InferRequestBuilder()),
              StatusIs(kInvalid, HasSubstr("has neither")));
  EXPECT_THAT(Parse(TrtTokens().Text("text_input", "x")),
              StatusIs(kInvalid, HasSubstr("has both tensors")));
  EXPECT_THAT(Parse(TrtText().Text("sampling_parameters", "{}")),
              StatusIs(kInvalid, HasSubstr("sampling_parameters")));
}

TEST(KserveRequestTest, AScalarTensorMayHaveZeroOneOrTwoDimensions) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {1}, {1, 1}}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request,
                                Parse(InferRequestBuilder()
                                          .Text("text_input", "hi", shape)
                                          .Bool("stream", true, shape)
                                          .Int("max_tokens", 3, shape)
                                          .Float("temperature", 0.5f, shape)));
    EXPECT_TRUE(request.streaming);
    EXPECT_EQ(request.sampling.max_tokens(), 3u);
    EXPECT_EQ(request.sampling.temperature(), 0.5f);
  }
}

TEST(KserveRequestTest, TensorsWithTypedContentsInsteadOfRawBytesAreAccepted) {
  inference::ModelInferRequest request;
  request.set_model_name("tiny");
  auto* text = request.add_inputs();
  text->set_name("text_input");
  text->set_datatype("BYTES");
  text->add_shape(1);
  text->mutable_contents()->add_bytes_contents("hi");
  auto* count = request.add_inputs();
  count->set_name("max_tokens");
  count->set_datatype("INT32");
  count->add_shape(1);
  count->mutable_contents()->add_int_contents(9);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest parsed,
                              ParseKserveRequest(request, false));
  EXPECT_EQ(parsed.text, "hi");
  EXPECT_EQ(parsed.sampling.max_tokens(), 9u);
  count->mutable_contents()->add_int_contents(9);
  EXPECT_THAT(
      ParseKserveRequest(request, false),
      StatusIs(kInvalid, HasSubstr("'max_tokens': shape [1] INT32: "
                                   "want 1 values in contents, have 2")));
}

TEST(KserveRequestTest, TheErrorForAWrongTensorNamesTheWantedAndTheGivenValue) {
  EXPECT_THAT(Parse(InferRequestBuilder().Text("text_input", "a", {2})),
              StatusIs(kInvalid, HasSubstr("'text_input'")));
  EXPECT_THAT(
      Parse(InferRequestBuilder().Strings("text_input", {"a", "b"}, {2})),
      StatusIs(kInvalid, HasSubstr("have shape [2]")));
  EXPECT_THAT(Parse(InferRequestBuilder().Int("text_input", 1)),
              StatusIs(kInvalid, HasSubstr("want datatype BYTES, have INT32")));
  EXPECT_THAT(Parse(TrtText().Raw("top_k", "INT32", {1}, "abc")),
              StatusIs(kInvalid, HasSubstr("want 4 raw bytes, have 3")));
  EXPECT_THAT(Parse(TrtText().Raw("top_k", "COMPLEX", {1}, "abc")),
              StatusIs(kInvalid, HasSubstr("datatype 'COMPLEX'")));
  EXPECT_THAT(Parse(TrtText().Raw("top_k", "INT32", {-1}, "abcd")),
              StatusIs(kInvalid, HasSubstr("shape [-1]")));
  EXPECT_THAT(
      Parse(TrtText().Raw("top_k", "INT32", {1 << 20, 1 << 20, 1 << 20}, "")),
      StatusIs(kInvalid, HasSubstr("elements")));
  EXPECT_THAT(Parse(TrtText().Float("top_k", 1.0f)),
              StatusIs(kInvalid, HasSubstr("have FP32")));
  EXPECT_THAT(Parse(TrtText().Int("stream", 1)),
              StatusIs(kInvalid, HasSubstr("want datatype BOOL")));
  EXPECT_THAT(Parse(TrtText().Int("max_tokens", 5)),
              StatusIs(kInvalid, HasSubstr("given twice")));
  InferRequestBuilder extra = TrtText();
  inference::ModelInferRequest request = extra.Build();
  request.add_raw_input_contents("x");
  EXPECT_THAT(ParseKserveRequest(request, false),
              StatusIs(kInvalid, HasSubstr("raw_input_contents")));
}

TEST(KserveRequestTest,
     AShapeLargerThanTheBytesOfItsTensorIsRefusedWithoutAllocation) {
  // The shape promises gigabytes of data, but there are no bytes.
  const InferRequestBuilder empty =
      InferRequestBuilder()
          .Raw("input_ids", "BYTES", {1 << 30}, "")
          .Int("request_output_len", 1);
  EXPECT_THAT(ParseKserveRequest(empty.Build(), false),
              StatusIs(kInvalid, HasSubstr("want at least 4294967296 "
                                           "raw bytes, have 0")));
  const InferRequestBuilder strings = InferRequestBuilder()
                                          .Strings("input_ids", {"", ""}, {2})
                                          .Int("request_output_len", 1);
  EXPECT_THAT(ParseKserveRequest(strings.Build(), false),
              StatusIs(kInvalid, HasSubstr("want datatype INT32")));
}

TEST(KserveRequestTest, BrokenStringTensorsAreRefused) {
  const auto raw = [](const std::string& bytes) {
    return Parse(InferRequestBuilder().Raw("text_input", "BYTES", {1}, bytes));
  };
  EXPECT_THAT(raw("ab"), StatusIs(kInvalid, HasSubstr("at least 4 raw bytes")));
  EXPECT_THAT(raw(InferRequestBuilder::EncodeStrings({"x"}) + "ab"),
              StatusIs(kInvalid, HasSubstr("4-byte length")));
  EXPECT_THAT(raw(std::string("\xff\xff\xff\xff", 4)),
              StatusIs(kInvalid, HasSubstr("want 4294967295 bytes, have 0")));
  EXPECT_THAT(raw(""), StatusIs(kInvalid, HasSubstr("have 0")));
}

TEST(KserveRequestTest, ATensorInSharedMemoryIsRefusedAsNotImplemented) {
  InferRequestBuilder builder = TrtText();
  inference::ModelInferRequest request = builder.Build();
  (*request.mutable_inputs(0)->mutable_parameters())["shared_memory_region"]
      .set_string_param("x");
  EXPECT_THAT(ParseKserveRequest(request, false),
              StatusIs(kNotBuilt, HasSubstr("shared_memory_region")));
}

TEST(KserveRequestTest, ValuesOfSamplingParametersMayBeGivenAsStrings) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest request,
      ParseJson(R"({"max_tokens": "100", "temperature": "0.25", "top_p": 0.5,
                    "top_k": -1, "min_p": "0.1", "ignore_eos": "true",
                    "seed": "12", "n": 2, "min_tokens": 3.0,
                    "repetition_penalty": 1, "presence_penalty": "-1",
                    "frequency_penalty": 0.5, "stop": "[\"a\", \"b\"]",
                    "stop_token_ids": [4, "5"], "logit_bias": {"7": "-2"},
                    "include_stop_str_in_output": true, "logprobs": "3",
                    "skip_special_tokens": false, "guided_json": null})"));
  const auto& sampling = request.sampling;
  EXPECT_EQ(sampling.max_tokens(), 100u);
  EXPECT_EQ(sampling.temperature(), 0.25f);
  EXPECT_EQ(sampling.top_p(), 0.5f);
  EXPECT_EQ(sampling.top_k(), 0);
  EXPECT_EQ(sampling.min_p(), 0.1f);
  EXPECT_TRUE(sampling.ignore_eos());
  EXPECT_EQ(request.seed, 12u);
  EXPECT_EQ(sampling.n(), 2u);
  EXPECT_EQ(sampling.min_tokens(), 3u);
  EXPECT_EQ(sampling.presence_penalty(), -1.0f);
  EXPECT_THAT(request.stop_strings, ElementsAre("a", "b"));
  EXPECT_THAT(sampling.stop_token_ids(), ElementsAre(4, 5));
  EXPECT_EQ(sampling.logit_bias().at(7), -2.0f);
  EXPECT_TRUE(request.include_stop_string);
  EXPECT_EQ(sampling.logprobs(), 3u);
  EXPECT_FALSE(request.skip_special_tokens);
}

TEST(KserveRequestTest, TheErrorForAWrongSamplingParameterNamesItAndItsValue) {
  EXPECT_THAT(ParseJson("[1]"), StatusIs(kInvalid, HasSubstr("JSON object")));
  EXPECT_THAT(ParseJson("{"), StatusIs(kInvalid, HasSubstr("JSON object")));
  EXPECT_THAT(ParseJson(R"({"max_tokens": "many"})"),
              StatusIs(kInvalid, HasSubstr("'max_tokens': want a number")));
  EXPECT_THAT(ParseJson(R"({"max_tokens": 1.5})"),
              StatusIs(kInvalid, HasSubstr("want an integer, have 1.5")));
  EXPECT_THAT(ParseJson(R"({"max_tokens": 0})"),
              StatusIs(kInvalid, HasSubstr("at least 1, have 0")));
  EXPECT_THAT(ParseJson(R"({"temperature": 1e300})"),
              StatusIs(kInvalid, HasSubstr("finite")));
  EXPECT_THAT(ParseJson(R"({"stop": 5})"),
              StatusIs(kInvalid, HasSubstr("'stop'")));
  EXPECT_THAT(ParseJson(R"({"ignore_eos": "perhaps"})"),
              StatusIs(kInvalid, HasSubstr("true or false")));
  EXPECT_THAT(ParseJson(R"({"logit_bias": {"x": 1}})"),
              StatusIs(kInvalid, HasSubstr("token ids")));
  std::string deep = R"({"stop": )" + std::string(100000, '[') +
                     std::string(100000, ']') + "}";
  EXPECT_THAT(ParseJson(deep),
              StatusIs(kInvalid, HasSubstr("nested deeper than 8")));
  EXPECT_THAT(ParseJson(std::string(300 << 10, ' ')),
              StatusIs(kInvalid, HasSubstr("at most")));
}

// Regression test: for such a text, a callback of the JSON parser once
// took seconds.
TEST(KserveRequestTest, JsonWithTooManyMembersIsRefusedBeforeItIsParsed) {
  std::string members = "{";
  std::string items = "{\"stop\": [";
  for (int i = 0; i < 20000; ++i) {
    absl::StrAppend(&members, i == 0 ? "" : ",", "\"", i, "\":{}");
    absl::StrAppend(&items, i == 0 ? "" : ",", "{}");
  }
  for (const std::string& text : {members + "}", items + "]}"}) {
    EXPECT_THAT(ParseJson(text),
                StatusIs(kInvalid,
                         HasSubstr("'sampling_parameters': JSON has more than "
                                   "16384 values")));
  }
}

TEST(KserveRequestTest, TheErrorForAnUnknownSamplingParameterNamesIt) {
  for (const std::string json :
       {R"({"guided_json": {}})", R"({"lora_name": "x"})",
        R"({"prompt_logprobs": 1})", R"({"use_beam_search": true})",
        R"({"best_of": 3})", R"({"wild": 1})", R"({"detokenize": false})"}) {
    const std::string name = json.substr(2, json.find('"', 2) - 2);
    EXPECT_THAT(ParseJson(json), StatusIs(kNotBuilt, HasSubstr(name)));
  }
  KVASIR_EXPECT_OK(ParseJson(R"({"use_beam_search": "false", "best_of": 1,
                            "early_stopping": false, "length_penalty": 2,
                            "guided_json": null})"));
}

TEST(KserveRequestTest,
     RequestParametersSetTheSamplingIfThereIsNoSamplingTensor) {
  InferRequestBuilder builder;
  builder.Text("text_input", "hi");
  builder.Parameter("temperature").set_string_param("0.5");
  builder.Parameter("max_tokens").set_int64_param(7);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request, Parse(builder));
  EXPECT_EQ(request.sampling.temperature(), 0.5f);
  EXPECT_EQ(request.sampling.max_tokens(), 7u);
  builder.Text("sampling_parameters", "{}");
  EXPECT_THAT(Parse(builder),
              StatusIs(kNotBuilt, HasSubstr("request parameter")));
}

TEST(KserveRequestTest,
     TritonsRequestParametersForPriorityTimeoutAndStreamingAreApplied) {
  InferRequestBuilder builder = TrtText();
  builder.Parameter("priority").set_uint64_param(3);
  builder.Parameter("timeout").set_int64_param(2500000);
  builder.Parameter("Streaming").set_bool_param(true);
  builder.WantsEmptyFinal();
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request, Parse(builder));
  EXPECT_EQ(request.priority, 2);
  EXPECT_EQ(request.queue_timeout, absl::Milliseconds(2500));
  EXPECT_TRUE(request.streaming);
  EXPECT_TRUE(request.wants_empty_final);
  builder.Parameter("sequence_id").set_int64_param(1);
  EXPECT_THAT(Parse(builder), StatusIs(kNotBuilt, HasSubstr("sequence_id")));
}

TEST(KserveRequestTest, AnEvictionBudgetIsAParameterOfEverySchema) {
  using proto::EvictionBudget;
  for (InferRequestBuilder builder :
       {InferRequestBuilder().Text("text_input", "hi"), TrtText(),
        TrtTokens()}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest without, Parse(builder));
    EXPECT_FALSE(without.eviction_budget.has_value());
    builder.Parameter("eviction_budget").set_string_param("0.2");
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest share, Parse(builder));
    EXPECT_EQ(share.eviction_budget, EvictionBudget{.ratio = 0.2});
    builder.Parameter("eviction_budget").set_double_param(0.25);
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest number, Parse(builder));
    EXPECT_EQ(number.eviction_budget, EvictionBudget{.ratio = 0.25});
    builder.Parameter("eviction_budget").set_int64_param(256);
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest slots, Parse(builder));
    EXPECT_EQ(slots.eviction_budget, EvictionBudget{.tokens = 256});
    builder.Parameter("eviction_budget").set_string_param("none");
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest none, Parse(builder));
    EXPECT_EQ(none.eviction_budget, EvictionBudget{.ratio = 1});
    builder.Parameter("eviction_budget").set_bool_param(true);
    EXPECT_THAT(Parse(builder),
                StatusIs(kInvalid, HasSubstr("'eviction_budget': want slots")));
  }
}

TEST(KserveRequestTest, AnEvictionBudgetMayBeASamplingParameter) {
  for (const char* text : {"1", "\"1\"", "\"none\""}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const KserveRequest request,
        ParseJson(absl::StrCat(R"({"eviction_budget": )", text, "}")));
    EXPECT_EQ(request.eviction_budget, proto::EvictionBudget{.ratio = 1});
  }
  for (const char* wrong : {"0", "-3", "1.5", "\"half\"", "[1]", "true"}) {
    EXPECT_THAT(ParseJson(absl::StrCat(R"({"eviction_budget": )", wrong, "}")),
                StatusIs(kInvalid, HasSubstr("'eviction_budget': want slots")))
        << wrong;
  }
  InferRequestBuilder twice;
  twice.Text("text_input", "hi");
  twice.Text("sampling_parameters", R"({"eviction_budget": 256})");
  twice.Parameter("eviction_budget").set_int64_param(256);
  EXPECT_THAT(Parse(twice), StatusIs(kInvalid, HasSubstr("one of them")));
}

TEST(KserveRequestTest, TheErrorForAParameterOfTheWrongTypeNamesIt) {
  for (const char* name : {"timeout", "priority", "Streaming"}) {
    InferRequestBuilder text = TrtText();
    text.Parameter(name).set_string_param("1");
    EXPECT_THAT(Parse(text), StatusIs(kInvalid, HasSubstr(name)));
    InferRequestBuilder number = TrtText();
    number.Parameter(name).set_double_param(1.0);
    EXPECT_THAT(Parse(number), StatusIs(kInvalid, HasSubstr(name)));
  }
  InferRequestBuilder negative = TrtText();
  negative.Parameter("timeout").set_int64_param(-1);
  EXPECT_THAT(Parse(negative), StatusIs(kInvalid, HasSubstr("have -1")));
  InferRequestBuilder large = TrtText();
  large.Parameter("priority").set_uint64_param(uint64_t{1} << 63);
  EXPECT_THAT(Parse(large), StatusIs(kInvalid, HasSubstr("2147483647")));
}

TEST(KserveRequestTest, ErrorsDoNotNameTheLargestValueOfAnIntegerType) {
  EXPECT_THAT(ParseJson(R"({"n": 0})"),
              StatusIs(kInvalid, AllOf(HasSubstr("'n': want an integer of at "
                                                 "least 1, have 0"),
                                       Not(HasSubstr("2147483647")))));
  EXPECT_THAT(Parse(TrtText().Int("num_return_sequences", 0)),
              StatusIs(kInvalid, AllOf(HasSubstr("at least 1"),
                                       Not(HasSubstr("2147483647")))));
  for (const char* name : {"n", "max_tokens", "top_k", "logprobs", "best_of"}) {
    // These values exceed the field's range: 2^31, 3e9, 2^63, 2^64, 1e39 (more
    // than a float can hold), and two of them as strings.
    for (const char* value : {"2147483648", "3000000000", "3e9",
                              "9223372036854775808", "18446744073709551616",
                              "\"18446744073709551616\"", "1e39", "\"1e39\""}) {
      EXPECT_THAT(
          ParseJson(absl::StrCat("{\"", name, "\": ", value, "}")),
          StatusIs(kInvalid, AllOf(HasSubstr(absl::StrCat(
                                       "'", name, "': want a smaller integer")),
                                   Not(HasSubstr("2147483647")),
                                   Not(HasSubstr("9223372036854775807")))));
    }
  }
  InferRequestBuilder samples = TrtText();
  samples.Numbers<int64_t>("num_return_sequences", "INT64", {1}, {3000000000});
  EXPECT_THAT(Parse(samples),
              StatusIs(kInvalid, AllOf(HasSubstr("want a smaller integer"),
                                       Not(HasSubstr("2147483647")))));
}

TEST(KserveRequestTest, TheNumberAndLengthOfStopStringsAreLimited) {
  std::vector<std::string> stops(65, "x");
  EXPECT_THAT(Parse(TrtText().Strings("stop_words", stops, {65})),
              StatusIs(kInvalid, HasSubstr("stop_words: want at most 64")));
  stops.resize(64);
  KVASIR_EXPECT_OK(
      Parse(TrtText().Strings("stop_words", stops, {64})).status());
  EXPECT_THAT(ParseJson(R"({"stop": ")" + std::string(1025, 'x') + "\"}"),
              StatusIs(kInvalid, HasSubstr("stop: want strings of at most "
                                           "1024 bytes, have one of 1025")));
  KVASIR_EXPECT_OK(
      ParseJson(R"({"stop": ")" + std::string(1024, 'x') + "\"}").status());
}

TEST(KserveRequestTest, TheParameterForAnEmptyFinalResponseMustBeABool) {
  InferRequestBuilder builder = TrtText();
  builder.Parameter("triton_enable_empty_final_response")
      .set_string_param("true");
  EXPECT_THAT(Parse(builder), StatusIs(kInvalid, HasSubstr("bool_param")));
}

TEST(KserveRequestTest,
     TheOutputBeginsWithThePromptOnlyIfItIsWantedAndNotStreamed) {
  const auto parse = [](std::optional<bool> stream, std::optional<bool> exclude,
                        bool unary = false) {
    InferRequestBuilder builder;
    builder.Text("text_input", "hi");
    if (stream) builder.Bool("stream", *stream);
    if (exclude) builder.Bool("exclude_input_in_output", *exclude);
    return Parse(builder, unary);
  };
  EXPECT_TRUE(parse({}, {})->prepend_prompt);
  EXPECT_TRUE(parse(false, false)->prepend_prompt);
  EXPECT_FALSE(parse(false, true)->prepend_prompt);
  EXPECT_FALSE(parse(true, {})->prepend_prompt);
  EXPECT_THAT(parse(true, false),
              StatusIs(kInvalid, HasSubstr("exclude_input_in_output")));
  // A unary call that asks for streaming gets one response, whose text does not
  // begin with the prompt.
  EXPECT_FALSE(parse(true, {}, /*unary=*/true)->streaming);
  EXPECT_FALSE(parse(true, {}, /*unary=*/true)->prepend_prompt);
}

TEST(KserveRequestTest, TensorRtLlmRequestsDefaultToGreedySampling) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest greedy, Parse(TrtText()));
  EXPECT_EQ(greedy.sampling.top_k(), 1);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest nucleus,
                              Parse(TrtText().Float("top_p", 0.9f)));
  EXPECT_EQ(nucleus.sampling.top_k(), 0);
  EXPECT_EQ(nucleus.sampling.top_p(), 0.9f);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest top_k,
      Parse(TrtText().Int("top_k", 8).Float("top_p", 0.0f)));
  EXPECT_EQ(top_k.sampling.top_k(), 8);
  EXPECT_EQ(top_k.sampling.top_p(), 1.0f);
}

// The client openai_trtllm sends the shape [1, 1] for every tensor, also for
// several stop words.
TEST(KserveRequestTest, OptionsWithValuesThatChangeNothingAreAccepted) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest request,
      Parse(TrtText()
                .Text("bad_words", "", {1, 1})
                .Strings("stop_words", {"</s>", "\n\n"}, {1, 1})
                .Int("beam_width", 1, {1, 1})
                .Float("length_penalty", 2.0f, {1, 1})
                .Numbers<uint64_t>("random_seed", "UINT64", {1, 1},
                                   {0xFFFFFFFFFFFFFFFFull})
                .Bool("return_context_logits", false)));
  EXPECT_THAT(request.bad_words, IsEmpty());
  EXPECT_THAT(request.stop_strings, ElementsAre("</s>", "\n\n"));
  EXPECT_EQ(request.seed, 0xFFFFFFFFFFFFFFFFull);
}

TEST(KserveRequestTest, TheErrorForAParameterThatIsNotImplementedNamesIt) {
  EXPECT_THAT(Parse(TrtText().Int("beam_width", 4)),
              StatusIs(kNotBuilt, HasSubstr("beam_width")));
  EXPECT_THAT(Parse(TrtText().Bool("return_context_logits", true)),
              StatusIs(kNotBuilt, HasSubstr("return_context_logits")));
  EXPECT_THAT(Parse(TrtText().Int("lora_task_id", 4)),
              StatusIs(kNotBuilt, HasSubstr("lora_task_id")));
  EXPECT_THAT(Parse(TrtText().Text("guided_decoding_guide", "x")),
              StatusIs(kNotBuilt, HasSubstr("guided_decoding_guide")));
  EXPECT_THAT(
      Parse(InferRequestBuilder().Text("text_input", "a").Text("image", "b")),
      StatusIs(kNotBuilt, HasSubstr("image")));
  EXPECT_THAT(Parse(TrtTokens().Int("draft_input_ids", 4)),
              StatusIs(kNotBuilt, HasSubstr("draft_input_ids")));
}

TEST(KserveRequestTest, TheTensorEndIdReplacesTheModelsOwnEndTokens) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest own,
                              Parse(TrtText().Int("end_id", 42)));
  EXPECT_TRUE(own.sampling.ignore_eos());
  EXPECT_THAT(own.sampling.stop_token_ids(), ElementsAre(42));
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest none,
                              Parse(TrtText().Int("end_id", -1)));
  EXPECT_TRUE(none.sampling.ignore_eos());
  EXPECT_THAT(none.sampling.stop_token_ids(), IsEmpty());
}

TEST(KserveRequestTest, AStopOrBadWordGivenAsTokenIdsMustBeOneToken) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest request,
      Parse(TrtTokens()
                .Numbers<int32_t>("stop_words_list", "INT32", {1, 2, 3},
                                  {11, 12, 0, 1, 2, -1})
                .Numbers<int32_t>("bad_words_list", "INT32", {2, 1}, {13, 1})));
  EXPECT_THAT(request.sampling.stop_token_ids(), ElementsAre(11, 12));
  EXPECT_EQ(request.sampling.logit_bias().at(13), kBannedTokenBias);
  EXPECT_THAT(Parse(TrtTokens().Numbers<int32_t>("stop_words_list", "INT32",
                                                 {2, 2}, {11, 12, 2, -1})),
              StatusIs(kNotBuilt, HasSubstr("a word of 2 tokens")));
  EXPECT_THAT(Parse(TrtTokens().Numbers<int32_t>("stop_words_list", "INT32",
                                                 {2, 1}, {11, 7})),
              StatusIs(kInvalid, HasSubstr("have 7")));
  EXPECT_THAT(Parse(TrtTokens().Numbers<int32_t>("stop_words_list", "INT32",
                                                 {3, 1}, {1, 2, 3})),
              StatusIs(kInvalid, HasSubstr("[2, n]")));
}

TEST(KserveRequestTest, TheTensorInputLengthsRemovesThePaddingOfInputIds) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest request,
      Parse(InferRequestBuilder()
                .Numbers<int32_t>("input_ids", "INT32", {4}, {7, 8, 0, -1})
                .Int("input_lengths", 2)
                .Int("request_output_len", 1)));
  EXPECT_THAT(request.token_ids.ToIds(), ElementsAre(7, 8));
  EXPECT_THAT(Parse(InferRequestBuilder()
                        .Numbers<int32_t>("input_ids", "INT32", {1}, {7})
                        .Int("input_lengths", 2)
                        .Int("request_output_len", 1)),
              StatusIs(kInvalid, HasSubstr("'input_lengths': want 0 to 1")));
  EXPECT_THAT(Parse(InferRequestBuilder()
                        .Numbers<int32_t>("input_ids", "INT32", {1}, {-7})
                        .Int("request_output_len", 1)),
              StatusIs(kInvalid, HasSubstr("have -7")));
  EXPECT_THAT(
      Parse(InferRequestBuilder()
                .Numbers<int32_t>("input_ids", "INT32", {2, 2}, {1, 2, 3, 4})
                .Int("request_output_len", 1)),
      StatusIs(kInvalid, HasSubstr("want shape [n] or [1, n]")));
}

TEST(KserveRequestTest, TokenIdsOfAnyIntegerTypeAreConvertedToTheSameEncoding) {
  for (const bool wide : {false, true}) {
    InferRequestBuilder builder;
    if (wide) {
      builder.Numbers<int64_t>("input_ids", "INT64", {1, 2}, {7, 0x01020304});
    } else {
      builder.Numbers<int32_t>("input_ids", "INT32", {1, 2}, {7, 0x01020304});
    }
    KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request,
                                Parse(builder.Int("request_output_len", 1)));
    EXPECT_EQ(request.token_ids.bytes(),
              absl::string_view("\7\0\0\0\4\3\2\1", 8));
  }
  EXPECT_THAT(
      Parse(InferRequestBuilder()
                .Numbers<int64_t>("input_ids", "INT64", {1}, {int64_t{1} << 32})
                .Int("request_output_len", 1)),
      StatusIs(kInvalid, HasSubstr("have 4294967296")));
}

// Clients fill the other tensors of a stop request with arbitrary values. The
// parser must ignore them.
TEST(KserveRequestTest, TheOtherTensorsOfAStopRequestAreIgnored) {
  InferRequestBuilder builder("tiny", "abc");
  builder.Raw("input_ids", "INT32", {1, 1}, "\xff\xff\xff\xff")
      .Int("input_lengths", 0, {1, 1})
      .Numbers<uint32_t>("request_output_len", "UINT32", {1, 1}, {0})
      .Bool("stop", true, {1, 1});
  builder.Parameter("Streaming").set_bool_param(true);
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request, Parse(builder));
  EXPECT_EQ(request.schema, KserveSchema::kStop);
  EXPECT_EQ(request.id, "abc");
}

TEST(KserveRequestTest, OnlyTheOutputsThatTheRequestListsAreReturned) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const KserveRequest trt,
      Parse(TrtText().Bool("return_log_probs", true).Output("cum_log_probs")));
  EXPECT_TRUE(trt.outputs.cum_log_probs);
  EXPECT_FALSE(trt.outputs.output_log_probs);
  EXPECT_FALSE(trt.outputs.text_output);
  // These outputs are listed, but no boolean tensor requests them.
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest vllm,
                              Parse(InferRequestBuilder()
                                        .Text("text_input", "hi")
                                        .Output("finish_reason")
                                        .Output("num_output_tokens")
                                        .Output("logprobs")));
  EXPECT_TRUE(vllm.outputs.finish_reason);
  EXPECT_TRUE(vllm.outputs.num_output_tokens);
  EXPECT_TRUE(vllm.outputs.logprobs);
  EXPECT_TRUE(vllm.sampling.has_logprobs());
  EXPECT_FALSE(vllm.outputs.text_output);
}

TEST(KserveRequestTest, TheErrorForAnUnknownOutputNamesIt) {
  EXPECT_THAT(Parse(TrtText().Output("nonsense")),
              StatusIs(kInvalid, HasSubstr("output 'nonsense' is unknown")));
  EXPECT_THAT(
      Parse(TrtText().Output("text_output").Output("output_ids")),
      StatusIs(kInvalid,
               HasSubstr("output 'output_ids' does not exist for the kind "
                         "of input tensors")));
}

// Triton's benchmark client perf_analyzer always lists all outputs.
TEST(KserveRequestTest, ListingAllOutputsDoesNotTurnOnTheOptionalOnes) {
  InferRequestBuilder builder = TrtText();
  for (const KserveOutputSpec& spec : KserveOutputSpecs()) {
    builder.Output(spec.name);
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const KserveRequest request, Parse(builder));
  EXPECT_TRUE(request.outputs.text_output);
  EXPECT_FALSE(request.outputs.output_ids);
  EXPECT_FALSE(request.outputs.output_log_probs);
  EXPECT_FALSE(request.sampling.has_logprobs());
}

// For any bytes, the parser must succeed or return one of its two error codes.
TEST(KserveRequestTest, RandomlyDamagedRequestsAreParsedOrRefused) {
  std::mt19937 random(11);
  const auto below = [&random](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  const std::vector<InferRequestBuilder> seeds = {
      TrtText().Strings("stop_words", {"a", "b"}, {1, 2}),
      TrtTokens().Numbers<int32_t>("stop_words_list", "INT32", {2, 2},
                                   {11, 12, 1, 2}),
      InferRequestBuilder()
          .Text("text_input", "hi")
          .Text("sampling_parameters",
                R"({"stop": ["a"], "logit_bias": {"1": 2}})")};
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = seeds[below(seeds.size())].Build().SerializeAsString();
    for (size_t i = 0; i <= below(4); ++i) {
      bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    inference::ModelInferRequest request;
    if (!request.ParseFromString(bytes)) continue;
    const auto parsed = ParseKserveRequest(request, below(2) == 0);
    if (parsed.ok()) continue;
    ++refused;
    EXPECT_TRUE(parsed.status().code() == kInvalid ||
                parsed.status().code() == kNotBuilt)
        << parsed.status();
  }
  EXPECT_GT(refused, 1000);
}

TEST(KserveRequestTest, TheListOfInputTensorsHasTheTensorsOfEverySchema) {
  std::vector<std::string> names;
  for (const KserveTensorSpec& spec : KserveInputSpecs()) {
    names.push_back(spec.name);
  }
  for (const InferRequestBuilder& builder : {TrtText(), TrtTokens()}) {
    for (const auto& input : builder.Build().inputs()) {
      EXPECT_THAT(names, ::testing::Contains(input.name()));
    }
  }
}

}  // namespace
}  // namespace kvasir::router
