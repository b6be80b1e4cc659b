#include "model/shapes/shape_config.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace kvasir::model {
namespace {

TEST(ShapeConfigTest, EveryKnownShapeGivesAModelConfigThatIsAccepted) {
  for (const std::string& name : KnownShapeNames()) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const ModelShape shape, FindShape(name));
    KVASIR_ASSERT_OK_AND_ASSIGN(const DecoderSpec spec, SpecOfShape(shape));
    EXPECT_EQ(spec.num_layers(), shape.num_layers) << name;
    EXPECT_EQ(spec.hidden_size, shape.hidden_size) << name;
    EXPECT_EQ(spec.num_heads, shape.num_query_heads) << name;
    EXPECT_EQ(spec.num_kv_heads, shape.num_kv_heads) << name;
    EXPECT_EQ(spec.head_dim, shape.head_dim) << name;
    EXPECT_EQ(spec.vocab_size, shape.vocab_size) << name;
    EXPECT_EQ(spec.tied_head, shape.tied_embedding) << name;
    EXPECT_EQ(spec.qkv_bias, shape.qkv_bias) << name;
    EXPECT_EQ(spec.layers[0].sliding_window, shape.sliding_window) << name;
    EXPECT_EQ(static_cast<double>(spec.rope.frequencies.size()),
              static_cast<double>(shape.head_dim) * shape.rotary_part / 2)
        << name;
    EXPECT_EQ(spec.norm == NormKind::kLayerNorm, HasLayerNorm(shape.family));
  }
}

TEST(ShapeConfigTest, TheErrorForContradictorySizesNamesTheField) {
  struct Case {
    const char* name;
    void (*change)(ModelShape&);
    const char* error;
    absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  };
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  for (const Case& each : {
           Case{
               "tinyllama-1.1b", [](ModelShape& s) { s.num_kv_heads = 5; },
               "num_key_value_heads: want a divisor of num_attention_heads 32, "
               "have 5"},
           Case{"tinyllama-1.1b", [](ModelShape& s) { s.head_dim = 63; },
                "head_dim: want an even number"},
           Case{"tinyllama-1.1b", [](ModelShape& s) { s.hidden_size = 0; },
                "hidden_size: want"},
           Case{"pythia-160m", [](ModelShape& s) { s.num_kv_heads = 4; },
                "num_key_value_heads: in GPTNeoXForCausalLM, it equals the "
                "number "
                "of query heads: want 12, have 4",
                kUnimplemented},
           Case{"pythia-160m",
                [](ModelShape& s) {
                  s.head_dim = 60;
                  s.hidden_size = 12 * 60;
                },
                "15 dims", kUnimplemented},
           Case{"opt-125m", [](ModelShape& s) { s.hidden_size = 516; },
                "it is hidden_size / heads: want 516 / 12, have 64",
                kUnimplemented},
       }) {
    ModelShape shape = *FindShape(each.name);
    each.change(shape);
    EXPECT_THAT(SpecOfShape(shape),
                base::StatusIs(each.code,
                               testing::AllOf(testing::HasSubstr(each.name),
                                              testing::HasSubstr(each.error))));
  }
}

}  // namespace
}  // namespace kvasir::model
