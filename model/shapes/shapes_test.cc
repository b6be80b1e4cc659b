#include "model/shapes/shapes.h"

#include "base/status_matchers.h"
#include "model/checkpoint/random_weights.h"

namespace kvasir::model {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

TEST(ShapesTest, AreValidAndFoundByName) {
  for (const std::string& name : KnownShapeNames()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const ModelShape shape, FindShape(name));
    EXPECT_EQ(shape.name, name);
    KVASIR_EXPECT_OK(ValidateShape(shape));
  }
}

// The published parameter counts.
TEST(ShapesTest, HaveThePublishedSizes) {
  const auto count = [](const char* name) {
    return CountParameters(*FindShape(name));
  };
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
  EXPECT_EQ(count("pythia-160m"), 162'322'944);
  EXPECT_EQ(count("pythia-410m"), 405'334'016);
  EXPECT_EQ(count("pythia-1b"), 1'011'781'632);
  EXPECT_EQ(count("opt-125m"), 125'239'296);
  EXPECT_EQ(count("opt-1.3b"), 1'315'758'080);
}

TEST(ShapesTest, CountAgreesWithTheTensorList) {
  for (const std::string& name : KnownShapeNames()) {
    const ModelShape shape = *FindShape(name);
    int64_t elements = 0;
    for (const RandomTensor& tensor : RandomTensorsOf(shape)) {
      elements += tensor.num_elements();
    }
    EXPECT_EQ(elements, CountParameters(shape)) << name;
  }
}

TEST(ShapesTest, TheBuiltInModelFitsItsLimit) {
  const ModelShape shape = *FindShape("kvasir-tiny");
  EXPECT_LT(2 * CountParameters(shape), 16'000'000);  // bytes in bf16
}

TEST(ShapesTest, UnknownNamesAreRefusedWithTheKnownOnes) {
  EXPECT_THAT(
      FindShape("gpt-5"),
      StatusIs(absl::StatusCode::kNotFound,
               testing::AllOf(HasSubstr("gpt-5"), HasSubstr("llama-3-8b"))));
}

TEST(ShapesTest, SizesThatDoNotFitAreRefusedByName) {
  ModelShape shape = *FindShape("tinyllama-1.1b");
  shape.num_kv_heads = 5;
  EXPECT_THAT(ValidateShape(shape),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("32 query heads are not a multiple of 5")));
  shape = *FindShape("tinyllama-1.1b");
  shape.head_dim = 63;
  EXPECT_THAT(ValidateShape(shape), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("head dim 63 is odd")));
  shape = *FindShape("tinyllama-1.1b");
  shape.hidden_size = 0;
  EXPECT_THAT(ValidateShape(shape), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("hidden is 0")));
  shape = *FindShape("pythia-160m");
  shape.num_kv_heads = 4;
  EXPECT_THAT(ValidateShape(shape),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("have 4 KV and 12 query heads")));
  shape = *FindShape("pythia-160m");
  shape.head_dim = 60;
  shape.hidden_size = 12 * 60;
  EXPECT_THAT(ValidateShape(shape), StatusIs(absl::StatusCode::kInvalidArgument,
                                             HasSubstr("is 15 dims")));
  shape = *FindShape("opt-125m");
  shape.hidden_size = 512;
  EXPECT_THAT(ValidateShape(shape),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("heads of 64 in a width of 512")));
}

}  // namespace
}  // namespace kvasir::model
