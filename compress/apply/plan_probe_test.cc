#include "compress/apply/plan_probe.h"

#include <memory>

#include "base/status_matchers.h"
#include "compress/testing/calibrate_fixture.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;

class PlanProbeTest : public CalibrateTest {
 protected:
  void SetUp() override {
    CalibrateTest::SetUp();
    const int64_t hidden = checkpoint_->spec().hidden_size;
    LayerCalibration layer;
    layer.input_gram = at::eye(hidden, at::kDouble);
    layer.input_sum = at::zeros({hidden}, at::kDouble);
    calibration_.num_tokens = 1;
    calibration_.layers.assign(checkpoint_->spec().layers.size(), layer);
  }

  CalibrationSample HeldOut(int64_t sequences) const {
    CalibrationSample sample = Sample(6, 24);
    sample.held_out_sequences = sequences;
    return sample;
  }

  // Makes a plan that codes keys and values in `bits` bits; 16 means uncoded
  // 16-bit numbers.
  kvasir::v1::KvPlan PlanOf(uint32_t bits) const {
    kvasir::v1::KvPlan plan = FullRankPlan(
        model::AttentionShapeOf(checkpoint_->spec()), kvasir::v1::F32);
    if (bits == 16) return plan;
    for (auto& layer : *plan.mutable_layers()) {
      for (auto* side : {layer.mutable_key(), layer.mutable_value()}) {
        auto* codec = side->mutable_parts(0)->mutable_codec();
        codec->Clear();
        codec->mutable_bits()->add_schedule(bits);
        codec->mutable_channel_static();
        codec->mutable_none();
      }
    }
    return plan;
  }

  Calibration calibration_;
};

TEST_F(PlanProbeTest, TheDivergenceOfAPlanFallsToZeroAsItsBitsGrow) {
  const CalibrationSample sample = HeldOut(3);
  int64_t steps = 0;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<PlanProbe> probe,
      PlanProbe::Create(*checkpoint_, calibration_, sample,
                        {.threads = 2, .progress = [&] {
                           ++steps;
                           return true;
                         }}));
  EXPECT_EQ(steps, PlanProbe::WindowsOf(sample));
  KVASIR_ASSERT_OK_AND_ASSIGN(const double whole, probe->Measure(PlanOf(16)));
  EXPECT_EQ(steps, 2 * PlanProbe::WindowsOf(sample) +
                       checkpoint_->spec().num_layers());
  KVASIR_ASSERT_OK_AND_ASSIGN(const double many, probe->Measure(PlanOf(8)));
  KVASIR_ASSERT_OK_AND_ASSIGN(const double few, probe->Measure(PlanOf(2)));
  EXPECT_LT(whole, 1e-6);
  EXPECT_GT(many, 0);
  EXPECT_GT(few, 10 * many);
}

TEST_F(PlanProbeTest, ASampleWithFewerThanTwoHeldOutSequencesIsRefused) {
  const CalibrationSample sample = HeldOut(1);
  EXPECT_THAT(
      PlanProbe::Create(*checkpoint_, calibration_, sample, {}).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               testing::HasSubstr("must have at least 2, but has 1")));
}

TEST_F(PlanProbeTest, TheProgressCallbackCanStopTheMeasurement) {
  const CalibrationSample sample = HeldOut(2);
  EXPECT_EQ(PlanProbe::Create(*checkpoint_, calibration_, sample,
                              {.progress = [] { return false; }})
                .status()
                .code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace kvasir::compress
