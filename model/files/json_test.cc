#include "model/files/json.h"

#include <string>

#include "base/status_matchers.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

TEST(JsonTest, RefusesTextThatIsNotValidJson) {
  EXPECT_THAT(ParseJson("{\"a\":", "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f.json is not valid JSON")));
  EXPECT_THAT(ParseJson("{\"a\":1e999}", "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f.json is not valid JSON")));
}

TEST(JsonTest, RefusesDuplicateKeysAtAnyDepth) {
  EXPECT_THAT(ParseJson(R"({"a":[{"b":1,"c":2,"b":3}]})", "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("key \"b\" occurs twice")));
  KVASIR_EXPECT_OK(ParseJson(R"([{"b":1},{"b":{"b":1}}])", "f.json"));
}

// Regression test: the error contained the whole key, however long it was.
TEST(JsonTest, AnErrorRepeatsOnlyTheBeginningOfAKey) {
  const std::string key(5 << 20, 'k');
  const absl::Status status =
      ParseJson("{\"" + key + "\":1,\"" + key + "\":2}", "f.json").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_LT(status.message().size(), 200u);
  // The JSON library's own message contains the whole unterminated string.
  EXPECT_LT(ParseJson("{\"" + key, "f.json").status().message().size(), 400u);
}

TEST(JsonTest, RefusesJsonThatIsNestedTooDeeply) {
  constexpr size_t kDeep = 1'000'000;
  EXPECT_THAT(
      ParseJson(std::string(kDeep, '[') + std::string(kDeep, ']'), "f.json"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("is nested deeper than 32")));
  std::string objects;
  for (int i = 0; i < 100; ++i) objects += "{\"a\":";
  objects += "1" + std::string(100, '}');
  EXPECT_THAT(ParseJson(objects, "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is nested deeper than 32")));
}

TEST(JsonTest, RefusesMoreValuesThanTheLimitBeforeItParses) {
  const JsonLimits limits = {.max_values = 5};
  KVASIR_EXPECT_OK(ParseJson(R"({"a":[1,"x,[{,"],"b":2})", "f.json", limits));
  EXPECT_THAT(ParseJson("[1,2,3,4,5", "f.json", limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f.json: JSON has more than 5 values")));
  EXPECT_THAT(ParseJson("[[[[[]]]]]", "f.json", limits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more than 5 values")));
}

TEST(JsonTest, TheErrorForAnInvalidFieldStatesTheExpectedAndTheActualValue) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const nlohmann::json root,
      ParseJson(R"({"a":"x","b":7,"c":null,"d":18446744073709551615})",
                "f.json"));
  const JsonFields fields(root, "f.json");
  EXPECT_THAT(fields.Int("a"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f.json: a: want an integer, have \"x\"")));
  EXPECT_THAT(fields.IntIn("b", 8, 9),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("b: want 8 to 9, have 7")));
  EXPECT_THAT(
      fields.IntIn("c", 8, 9),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("c: is missing")));
  EXPECT_THAT(fields.Int("d"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2^63")));
  EXPECT_TRUE(fields.IsNull("c"));
  EXPECT_FALSE(fields.IsNull("e"));
  KVASIR_ASSERT_OK_AND_ASSIGN(const int64_t fallback,
                              fields.IntIn("e", 1, 5, 3));
  EXPECT_EQ(fallback, 3);
}

}  // namespace
}  // namespace kvasir::model
