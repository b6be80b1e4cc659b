#include "compress/apply/range_collector.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/tensors/tensor_loader.h"
#include "compress/testing/folder_fixture.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// The first layer has so few bits that its codes clearly change the inputs of
// the second layer.
constexpr char kPlan[] = R"({"schemaVersion": 1, "method": "test", "layers": [
  {"key": {"parts": [{"full": {}, "stored": "PRE_ROPE",
     "codec": {"bits": {"schedule": [2]}, "channelStatic": {}, "none": {}}}]},
   "value": {"parts": [{"full": {}, "stored": "NO_ROPE",
     "codec": {"bits": {"schedule": [1]}, "channelStatic": {}, "none": {}}}]}},
  {"key": {"parts": [{"lowRank": {"groups": [{"heads": [0, 1], "rank": 6}]},
     "uses": [{"reconstruct": {}}], "stored": "PRE_ROPE",
     "codec": {"bits": {"schedule": [3]}, "channelStatic": {}, "none": {}}}]},
   "value": {"parts": [{"lowRank": {"groups": [{"heads": [0], "rank": 4},
                                               {"heads": [1], "rank": 8}]},
     "uses": [{"fold": {}}], "stored": "NO_ROPE",
     "codec": {"bits": {"schedule": [4]}, "channelStatic": {},
               "hadamardOnline": {}}}]}}]})";
constexpr int kKeyBits[] = {2, 3};
constexpr int kValueBits[] = {1, 4};
// Widths of the latents that are multiplied by a Hadamard matrix
// (HADAMARD_ONLINE). They belong to the values of the second layer.
constexpr int64_t kRotatedWidths[] = {4, 8};

struct Range {
  std::vector<double> low;  // the minimum of each channel
  std::vector<double> high;
};

// Finds the minimum and maximum of every channel by a loop over all numbers.
class PlainRanges : public LayerObserver {
 public:
  const Range& Of(int64_t layer, plan::Side side) const {
    return ranges_[Index(layer, side)];
  }

  void OnLatent(int64_t layer, plan::Side side, int,
                const at::Tensor& latent) override {
    const at::Tensor rows = latent.flatten(0, -2).contiguous();
    const int64_t width = rows.size(1);
    Range& range = ranges_[Index(layer, side)];
    const double infinity = std::numeric_limits<double>::infinity();
    range.low.resize(static_cast<size_t>(width), infinity);
    range.high.resize(static_cast<size_t>(width), -infinity);
    const bool rotated = layer == 1 && side == plan::Side::kValue;
    for (int64_t r = 0; r < rows.size(0); ++r) {
      const float* row = rows.data_ptr<float>() + r * width;
      std::vector<double> numbers(row, row + width);
      if (rotated) numbers = Rotated(numbers);
      for (size_t c = 0; c < numbers.size(); ++c) {
        range.low[c] = std::min(range.low[c], numbers[c]);
        range.high[c] = std::max(range.high[c], numbers[c]);
      }
    }
  }

 private:
  static size_t Index(int64_t layer, plan::Side side) {
    return static_cast<size_t>(2 * layer + (side == plan::Side::kKey ? 0 : 1));
  }

  // Returns the latents after multiplication by the Hadamard matrix. Its entry
  // (i, j) is negative if i and j have an odd number of 1 bits in common.
  static std::vector<double> Rotated(const std::vector<double>& numbers) {
    std::vector<double> rotated;
    size_t begin = 0;
    for (const int64_t width : kRotatedWidths) {
      const auto n = static_cast<size_t>(width);
      for (size_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (size_t j = 0; j < n; ++j) {
          sum += std::popcount(i & j) % 2 == 0 ? numbers[begin + j]
                                               : -numbers[begin + j];
        }
        rotated.push_back(sum / std::sqrt(static_cast<double>(n)));
      }
      begin += n;
    }
    return rotated;
  }

  Range ranges_[4];
};

class RangeCollectorTest : public FolderTest {
 protected:
  void SetUp() override {
    RandomCheckpointOptions options;
    options.shape = {.name = "small",
                     .num_layers = 2,
                     .hidden_size = 24,
                     .intermediate_size = 40,
                     .num_query_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 8,
                     .vocab_size = 50,
                     .max_position = 64};
    options.dtype = model::TensorType::kF32;
    options.out = folder_;
    KVASIR_ASSERT_OK(WriteRandomCheckpoint(
        options, [](const RandomCheckpointProgress&) { return true; }));
    auto base = model::Checkpoint::Open(folder_.string());
    KVASIR_ASSERT_OK(base.status());
    base_ = std::make_unique<model::Checkpoint>(*std::move(base));
    KVASIR_ASSERT_OK_AND_ASSIGN(plan_, plan::ParsePlanJson(kPlan, "test"));
    KVASIR_ASSERT_OK(
        plan::ValidatePlan(plan_, model::AttentionShapeOf(base_->spec())));
    sample_.sequence_tokens = 9;
    for (int32_t s = 0; s < 3; ++s) {
      std::vector<int32_t>& sequence = sample_.sequences.emplace_back();
      for (int32_t t = 0; t < 9; ++t) {
        sequence.push_back((31 * t + 17 * s + t * t) % 50);
      }
    }
    at::manual_seed(3);
    for (int l = 0; l < 2; ++l) {
      auto program = MakeLayerProgram(base_->spec(), &plan_.layers(l), l);
      KVASIR_ASSERT_OK(program.status());
      programs_.push_back(*std::move(program));
      TensorMap& tensors = attention_.emplace_back();
      for (const auto& want : programs_.back().attention_tensors) {
        if (want.f32_only) continue;
        tensors[want.name] = at::randn(want.shape) * 0.5;
      }
    }
  }

  absl::Status Collect(std::vector<TensorMap>& attention) const {
    KVASIR_ASSIGN_OR_RETURN(
        RangeCollector collector,
        RangeCollector::Create(*base_, plan_, sample_, {.threads = 2}));
    for (size_t l = 0; l < attention.size(); ++l) {
      KVASIR_RETURN_IF_ERROR(
          collector.Collect(static_cast<int64_t>(l), attention[l]));
    }
    return absl::OkStatus();
  }

  // Returns the minimum and maximum of each latent channel in the model with
  // these tensors, computed with or without codes.
  absl::StatusOr<PlainRanges> RangesOf(const std::vector<TensorMap>& attention,
                                       bool code_latents) const {
    ReferenceDecoder::Parts parts;
    parts.spec = base_->spec();
    parts.plan = plan_;
    KVASIR_ASSIGN_OR_RETURN(parts.outer, LoadOuterTensors(*base_));
    for (size_t l = 0; l < attention.size(); ++l) {
      KVASIR_ASSIGN_OR_RETURN(TensorMap tensors,
                              LoadLayer(*base_, static_cast<int64_t>(l)));
      std::erase_if(tensors, [](const auto& tensor) {
        return tensor.first.rfind("self_attn.", 0) == 0;
      });
      tensors.insert(attention[l].begin(), attention[l].end());
      parts.layers.push_back(std::move(tensors));
    }
    KVASIR_ASSIGN_OR_RETURN(const ReferenceDecoder decoder,
                            ReferenceDecoder::FromTensors(std::move(parts)));
    PlainRanges ranges;
    for (const std::vector<int32_t>& sequence : sample_.sequences) {
      const at::Tensor ids =
          at::tensor(std::vector<int64_t>(sequence.begin(), sequence.end()));
      KVASIR_RETURN_IF_ERROR(
          decoder
              .LastHidden(ids.unsqueeze(0),
                          {.observer = &ranges, .code_latents = code_latents})
              .status());
    }
    return ranges;
  }

  std::unique_ptr<model::Checkpoint> base_;
  kvasir::v1::KvPlan plan_;
  CalibrationSample sample_;
  std::vector<LayerProgram> programs_;
  // Random tensors of each layer, without ranges.
  std::vector<TensorMap> attention_;
};

void ExpectRange(const TensorMap& tensors, const std::string& prefix, int bits,
                 const Range& want) {
  const at::Tensor& minimum = tensors.at(prefix + ".range.min");
  const at::Tensor& scale = tensors.at(prefix + ".range.scale");
  ASSERT_EQ(minimum.size(0), static_cast<int64_t>(want.low.size()));
  const double levels = (1 << bits) - 1;
  for (size_t c = 0; c < want.low.size(); ++c) {
    const auto channel = static_cast<int64_t>(c);
    EXPECT_NEAR(minimum[channel].item<double>(), want.low[c], 1e-4)
        << prefix << " channel " << c;
    EXPECT_NEAR(scale[channel].item<double>() * levels,
                want.high[c] - want.low[c], 1e-4)
        << prefix << " channel " << c;
  }
}

TEST_F(RangeCollectorTest, RangesCoverTheCompressedModelsLatents) {
  KVASIR_ASSERT_OK(Collect(attention_));
  KVASIR_ASSERT_OK_AND_ASSIGN(const PlainRanges plain,
                              RangesOf(attention_, /*code_latents=*/true));
  for (size_t l = 0; l < 2; ++l) {
    const auto layer = static_cast<int64_t>(l);
    ExpectRange(attention_[l], programs_[l].key[0].prefix, kKeyBits[l],
                plain.Of(layer, plan::Side::kKey));
    ExpectRange(attention_[l], programs_[l].value.prefix, kValueBits[l],
                plain.Of(layer, plan::Side::kValue));
  }
  // The ranges of the second layer depend on the codes of the first layer:
  // without codes they are different.
  KVASIR_ASSERT_OK_AND_ASSIGN(const PlainRanges exact,
                              RangesOf(attention_, /*code_latents=*/false));
  const std::vector<double>& coded = plain.Of(1, plan::Side::kKey).low;
  const std::vector<double>& uncoded = exact.Of(1, plan::Side::kKey).low;
  double farthest = 0.0;
  for (size_t c = 0; c < coded.size(); ++c) {
    farthest = std::max(farthest, std::abs(coded[c] - uncoded[c]));
  }
  EXPECT_GT(farthest, 1e-2);
}

TEST_F(RangeCollectorTest, FittedRangesUseTheFirstSequencesOfEachDomain) {
  kvasir::v1::KvPlan fitted = plan_;
  const auto set_runs = [](kvasir::v1::Codec* codec) {
    codec->mutable_bits()->clear_schedule();
    codec->mutable_bits()->add_runs();
  };
  CalibrationSample sample;
  sample.sequence_tokens = 1024;
  sample.sequences.resize(40);
  sample.domains.resize(20);
  EXPECT_EQ(RangeCollector::SequencesFor(fitted, sample, {}), 40);
  set_runs(fitted.mutable_layers(0)
               ->mutable_key()
               ->mutable_parts(0)
               ->mutable_codec());
  // Only the first layer's ranges are fitted. Ranges of the second layer still
  // reach from minimum to maximum, so they need all sequences.
  EXPECT_EQ(RangeCollector::SequencesFor(fitted, sample, {}), 40);
  set_runs(fitted.mutable_layers(1)
               ->mutable_key()
               ->mutable_parts(0)
               ->mutable_codec());
  EXPECT_EQ(RangeCollector::SequencesFor(fitted, sample, {}), 20);
  sample.domains.clear();
  EXPECT_EQ(RangeCollector::SequencesFor(fitted, sample, {}), 16);
  sample.sequence_tokens = 128;
  EXPECT_EQ(RangeCollector::SequencesFor(fitted, sample, {}), 40);
}

TEST_F(RangeCollectorTest, LatentsThatAreNotFiniteAreAnErrorThatNamesTheLayer) {
  for (const char* side : {"key", "value"}) {
    std::vector<TensorMap> attention = attention_;
    const ProgramPart& part =
        std::string(side) == "key" ? programs_[1].key[0] : programs_[1].value;
    at::Tensor& down = attention[1].at(part.prefix + ".down.weight");
    down = down.clone();
    down[2][0].fill_(std::numeric_limits<float>::infinity());
    EXPECT_THAT(Collect(attention),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("layer 1 " + part.prefix)));
  }
}

}  // namespace
}  // namespace kvasir::compress
