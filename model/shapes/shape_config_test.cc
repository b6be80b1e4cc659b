#include "model/shapes/shape_config.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace kvasir::model {
namespace {

TEST(ShapeConfigTest, EveryKnownShapeIsAModelThatThisEngineReads) {
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

}  // namespace
}  // namespace kvasir::model
