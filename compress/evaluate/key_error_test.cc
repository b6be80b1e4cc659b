#include "compress/evaluate/key_error.h"

#include <cmath>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "compress/testing/test_decoder.h"
#include "gmock/gmock.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

std::vector<at::Tensor> Windows() {
  return {at::arange(1, 21, at::kLong), at::arange(10, 30, at::kLong)};
}

kvasir::v1::KvPlan ExactPlan() {
  return plan::FullRankPlan(model::AttentionShapeOf(TestSpec()),
                            kvasir::v1::F32);
}

ReferenceDecoder MakeDecoder(ReferenceDecoder::Parts parts,
                             kvasir::v1::KvPlan plan) {
  parts.plan = std::move(plan);
  auto decoder = ReferenceDecoder::FromTensors(std::move(parts));
  KVASIR_EXPECT_OK(decoder);
  return *std::move(decoder);
}

KeyError Measure(const ReferenceDecoder& decoder) {
  const ReferenceDecoder teacher = TestDecoder();
  const auto meter = KeyErrorMeter::Create(teacher, Windows());
  KVASIR_EXPECT_OK(meter);
  const auto error = meter->Measure(decoder);
  KVASIR_EXPECT_OK(error);
  EXPECT_TRUE(error->has_value());
  return **error;
}

ReferenceDecoder WithKeysTimes(double factor) {
  ReferenceDecoder::Parts parts = TestParts(TestSpec(), 1);
  for (TensorMap& layer : parts.layers) {
    at::Tensor& weight = layer["self_attn.k_proj.weight"];
    weight = weight * factor;
  }
  return MakeDecoder(std::move(parts), ExactPlan());
}

TEST(KeyErrorTest, AnExactCacheHasNoKeyError) {
  EXPECT_EQ(Measure(WithKeysTimes(1.0)).relative, 0.0);
}

// Each layer gets the teacher's inputs, so errors of one layer do not reach the
// next layer.
TEST(KeyErrorTest, KeyErrorsAreRelativeToTheKeysMinusTheirMeanInEachLayer) {
  const ReferenceDecoder teacher = TestDecoder();
  // Records the inputs of each layer, from which the means of its keys are
  // computed.
  class Inputs : public LayerObserver {
   public:
    void OnAttentionInput(int64_t layer, const at::Tensor& x) override {
      rows[layer].push_back(x[0].to(at::kDouble));
    }
    std::vector<at::Tensor> rows[2];
  };
  Inputs inputs;
  for (const at::Tensor& ids : Windows()) {
    KVASIR_ASSERT_OK(teacher.Logits(ids.unsqueeze(0), {.observer = &inputs}));
  }
  double expected = 0.0;
  for (int64_t l = 0; l < 2; ++l) {
    const at::Tensor keys = at::matmul(
        at::cat(inputs.rows[l]),
        teacher.layer(l).at("self_attn.k_proj.weight").to(at::kDouble).t());
    const double energy = keys.square().sum().item<double>();
    const double centred = (keys - keys.mean(0)).square().sum().item<double>();
    expected += 0.25 * energy / centred / 2.0;
  }
  EXPECT_NEAR(Measure(WithKeysTimes(1.5)).relative, std::sqrt(expected), 1e-5);
}

TEST(KeyErrorTest, ThePredictedKeyErrorOfChannelsWithNBitsIsTwoToTheMinusN) {
  ReferenceDecoder::Parts parts = TestParts(TestSpec(), 1);
  kvasir::v1::KvPlan plan = ExactPlan();
  for (size_t l = 0; l < 2; ++l) {
    auto* codec = plan.mutable_layers(static_cast<int>(l))
                      ->mutable_key()
                      ->mutable_parts(0)
                      ->mutable_codec();
    codec->mutable_bits()->add_schedule(4);
    codec->mutable_channel_static();
    parts.layers[l]["self_attn.k_proj.range.min"] = at::full({16}, -2.0);
    parts.layers[l]["self_attn.k_proj.range.scale"] = at::full({16}, 4.0 / 15);
  }
  const KeyError error = Measure(MakeDecoder(std::move(parts), plan));
  ASSERT_TRUE(error.predicted.has_value());
  EXPECT_NEAR(*error.predicted, 1.0 / 16, 1e-12);
  // The steps of the codes are 0.27 wide, so the error is about 0.27 / sqrt(12)
  // = 0.08. The standard deviation of the keys is near 0.45.
  EXPECT_GT(error.relative, 0.05);
  EXPECT_LT(error.relative, 0.5);
}

TEST(KeyErrorTest, NoKeyErrorIsPredictedForKeysWithoutCodes) {
  EXPECT_FALSE(Measure(WithKeysTimes(1.0)).predicted.has_value());
}

}  // namespace
}  // namespace kvasir::compress
