#include "model/shapes/shapes.h"

#include "base/status_matchers.h"
#include "model/checkpoint/random_weights.h"

namespace kvasir::model {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

TEST(ShapesTest, FindsShapesByName) {
  for (const std::string& name : KnownShapeNames()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const ModelShape shape, FindShape(name));
    EXPECT_EQ(shape.name, name);
  }
}

TEST(ShapesTest, ShapesHaveThePublishedParameterCounts) {
  const auto count = [](const char* name) {
    return CountParameters(*FindShape(name));
  };
  EXPECT_EQ(count("smollm2-135m"), 134'515'008);
  EXPECT_EQ(count("tinyllama-1.1b"), 1'100'048'384);
  EXPECT_EQ(count("llama-2-7b"), 6'738'415'616);
  EXPECT_EQ(count("llama-2-13b"), 13'015'864'320);
  EXPECT_EQ(count("llama-2-70b"), 68'976'648'192);
  EXPECT_EQ(count("llama-3-8b"), 8'030'261'248);
  EXPECT_EQ(count("llama-3-70b"), 70'553'706'496);
  EXPECT_EQ(count("llama-3.2-1b"), 1'235'814'400);
  EXPECT_EQ(count("mistral-7b"), 7'241'732'096);
  EXPECT_EQ(count("qwen2.5-0.5b"), 494'032'768);
  EXPECT_EQ(count("qwen2.5-1.5b"), 1'543'714'304);
  EXPECT_EQ(count("qwen2.5-7b"), 7'615'616'512);
  EXPECT_EQ(count("qwen3-0.6b"), 596'049'920);
  EXPECT_EQ(count("qwen3-4b"), 4'022'468'096);
  EXPECT_EQ(count("qwen3-8b"), 8'190'735'360);
  EXPECT_EQ(count("smollm3-3b"), 3'075'098'624);
  EXPECT_EQ(count("pythia-160m"), 162'322'944);
  EXPECT_EQ(count("pythia-410m"), 405'334'016);
  EXPECT_EQ(count("pythia-1b"), 1'011'781'632);
  EXPECT_EQ(count("opt-125m"), 125'239'296);
  EXPECT_EQ(count("opt-1.3b"), 1'315'758'080);
}

TEST(ShapesTest, TheBuiltInModelIsSmallerThanItsSizeLimit) {
  const ModelShape shape = *FindShape("kvasir-tiny");
  // 2 bytes for each parameter
  EXPECT_LT(2 * CountParameters(shape), 16'000'000);
}

TEST(ShapesTest, TheErrorForAnUnknownShapeListsTheKnownShapes) {
  EXPECT_THAT(
      FindShape("gpt-5"),
      StatusIs(absl::StatusCode::kNotFound,
               testing::AllOf(HasSubstr("gpt-5"), HasSubstr("llama-3-8b"))));
}

}  // namespace
}  // namespace kvasir::model
