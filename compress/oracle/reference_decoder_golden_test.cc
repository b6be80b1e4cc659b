// Compares the reference decoder with the reference implementation's logits,
// for every fixture of tests/golden (tests/golden/README.md describes them).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/runtime/device.h"
#include "gmock/gmock.h"
#include "model/checkpoint/checkpoint.h"
#include "model/files/file.h"
#include "model/files/json.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

std::string GoldenModels() {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/tests/golden/models");
}

std::vector<std::string> ModelNames() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(GoldenModels())) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(ReferenceDecoderGoldenFixturesTest, AllFixturesExist) {
  EXPECT_GE(ModelNames().size(), 21u);
}

struct Expected {
  at::Tensor ids;     // [1, T]
  at::Tensor logits;  // [T, V]
};

Expected ReadExpected(const std::string& name) {
  const std::string folder = absl::StrCat(GoldenModels(), "/", name);
  auto text = model::ReadSmallFile(folder + "/expected.json", 1 << 20);
  KVASIR_EXPECT_OK(text);
  auto root = model::ParseJson(*text, name);
  KVASIR_EXPECT_OK(root);
  Expected expected;
  expected.ids =
      at::tensor((*root)["input_ids"].get<std::vector<int64_t>>()).unsqueeze(0);
  expected.logits =
      at::empty((*root)["logits_shape"].get<std::vector<int64_t>>());
  auto bytes = model::ReadSmallFile(
      absl::StrCat(folder, "/", (*root)["logits_file"].get<std::string>()),
      16 << 20);
  KVASIR_EXPECT_OK(bytes);
  EXPECT_EQ(bytes->size(), expected.logits.nbytes());
  std::memcpy(expected.logits.data_ptr(), bytes->data(), bytes->size());
  return expected;
}

// Returns the largest error of any logit, divided by the largest logit.
double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).abs().max() / want.abs().max()).item<double>();
}

class ReferenceDecoderGoldenTest : public testing::TestWithParam<std::string> {
};

TEST_P(ReferenceDecoderGoldenTest,
       LogitsEqualThoseOfTheReferenceImplementation) {
  const Expected expected = ReadExpected(GetParam());
  const auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/", GetParam()));
  KVASIR_ASSERT_OK(checkpoint);
  const auto decoder = ReferenceDecoder::Load(*checkpoint, std::nullopt);
  KVASIR_ASSERT_OK(decoder);
  const auto logits = decoder->Logits(expected.ids);
  KVASIR_ASSERT_OK(logits);
  EXPECT_LE(RelativeError((*logits)[0], expected.logits), 1e-4);
}

TEST_P(ReferenceDecoderGoldenTest, APlanOfFullRankDoesNotChangeTheLogits) {
  const Expected expected = ReadExpected(GetParam());
  const auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/", GetParam()));
  KVASIR_ASSERT_OK(checkpoint);
  const auto decoder = ReferenceDecoder::Load(
      *checkpoint,
      plan::FullRankPlan(model::AttentionShapeOf(checkpoint->spec()),
                         kvasir::v1::F32));
  KVASIR_ASSERT_OK(decoder);
  const auto logits = decoder->Logits(expected.ids);
  KVASIR_ASSERT_OK(logits);
  EXPECT_LE(RelativeError((*logits)[0], expected.logits), 1e-4);
}

TEST_P(ReferenceDecoderGoldenTest,
       AGpuGivesTheSameLogitsAsTheReferenceImplementation) {
  const auto device = OpenDevice("cuda");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  const Expected expected = ReadExpected(GetParam());
  const auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/", GetParam()));
  KVASIR_ASSERT_OK(checkpoint);
  const auto decoder =
      ReferenceDecoder::Load(*checkpoint, std::nullopt, {.device = *device});
  KVASIR_ASSERT_OK(decoder);
  const auto logits = decoder->Logits(expected.ids);
  KVASIR_ASSERT_OK(logits);
  EXPECT_LE(RelativeError((*logits)[0].cpu(), expected.logits), 1e-4);
}

// A model's context may be very long, so the rotation tables must cover only
// the positions that were used.
TEST(ReferenceDecoderLoadTest,
     RotationTablesAreOnlyAsLongAsTheLongestSequence) {
  const auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/llama-mha"));
  KVASIR_ASSERT_OK(checkpoint);
  const auto decoder = ReferenceDecoder::Load(*checkpoint, std::nullopt);
  KVASIR_ASSERT_OK(decoder);
  EXPECT_EQ(decoder->RotationOf(3, 0).cos.size(0), 3);
  EXPECT_EQ(decoder->RotationOf(7, 0).sin.size(0), 7);
}

TEST(ReferenceDecoderLoadTest, ACheckpointMustHaveTheTensorsThatThePlanNeeds) {
  const auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/llama-bias"));
  KVASIR_ASSERT_OK(checkpoint);
  const plan::AttentionShape shape =
      model::AttentionShapeOf(checkpoint->spec());
  kvasir::v1::KvPlan plan = plan::FullRankPlan(shape, kvasir::v1::F32);
  // The plan folds the lift of low-rank values into o_proj. So it needs tensors
  // that the checkpoint lacks.
  kvasir::v1::Part* value =
      plan.mutable_layers(0)->mutable_value()->mutable_parts(0);
  auto* group = value->mutable_low_rank()->add_groups();
  group->set_rank(2);
  for (int64_t head = 0; head < checkpoint->spec().num_kv_heads; ++head) {
    group->add_heads(static_cast<uint32_t>(head));
  }
  value->add_uses()->mutable_fold();
  EXPECT_THAT(ReferenceDecoder::Load(*checkpoint, plan).status(),
              base::StatusIs(absl::StatusCode::kNotFound,
                             testing::HasSubstr("the plan needs the shape")));
}

INSTANTIATE_TEST_SUITE_P(Models, ReferenceDecoderGoldenTest,
                         testing::ValuesIn(ModelNames()), [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace kvasir::compress
