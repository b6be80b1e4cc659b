// Tests joint parts, in which keys and values share a latent. The output has
// the same bits as with two equal latents, one for keys and one for values, and
// the cache takes half the bytes.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "base/status_matchers.h"
#include "model/shapes/shape_config.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kPromptTokens = 64;
constexpr int64_t kTokens = kPromptTokens + 8;
// The sliding window of FamilyCases.
constexpr int64_t kWindow = 24;

// Offers the tensors of a joint part under the tensor names of separate key and
// value parts.
class ApartSource final : public WeightSource {
 public:
  explicit ApartSource(WeightSource* joint) : joint_(joint) {}
  absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const override {
    return joint_->TypeOf(Renamed(name));
  }
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override {
    return joint_->SizeOf(Renamed(name));
  }
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override {
    return joint_->Read(Renamed(name), range, buffer, consume);
  }
  std::string WeightTiles() const override { return joint_->WeightTiles(); }

 private:
  static std::string Renamed(const std::string& name) {
    return absl::StrReplaceAll(name, {{".k_proj.up.", ".kv_proj.up_key."},
                                      {".v_proj.up.", ".kv_proj.up_value."},
                                      {".k_proj.", ".kv_proj."},
                                      {".v_proj.", ".kv_proj."}});
  }

  WeightSource* const joint_;
};

// Returns the plan with each joint part replaced by a separate key part and
// value part.
kvasir::v1::KvPlan Apart(kvasir::v1::KvPlan plan) {
  for (kvasir::v1::LayerPlan& layer : *plan.mutable_layers()) {
    for (const auto serves :
         {kvasir::v1::SERVES_KEY, kvasir::v1::SERVES_VALUE}) {
      const bool key = serves == kvasir::v1::SERVES_KEY;
      kvasir::v1::Part* const part =
          (key ? layer.mutable_key() : layer.mutable_value())->add_parts();
      *part = layer.joint(0);
      part->clear_uses();
      if (!key) part->set_stored(kvasir::v1::NO_ROPE);
      for (const kvasir::v1::Part::Use& use : layer.joint(0).uses()) {
        if (use.serves() == serves) *part->add_uses() = use;
      }
    }
    layer.clear_joint();
  }
  return plan;
}

struct Outcome {
  std::vector<float> logits;  // for every token
  double bytes_per_token = 0;
  int64_t side_pages = 0;
  int64_t static_codes = 0;
};

// Runs a text: the prompt in four chunks, then the remaining tokens one by one
// as output.
Outcome RunText(const FamilyCase& each, bool joint) {
  Outcome outcome;
  const auto spec = model::SpecOfShape(each.shape);
  KVASIR_EXPECT_OK(spec);
  const kvasir::v1::KvPlan plan = PlanOf(each.plan_case, *spec);
  auto source = RandomSource::Create(each.shape, *spec, Resolved(plan, *spec),
                                     7, kernels::DType::kBf16);
  KVASIR_EXPECT_OK(source);
  ApartSource apart(source->get());
  RankOptions options = TinyOptions();
  options.executor.max_batched_tokens = kPromptTokens;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    outcome.logits.insert(outcome.logits.end(), row.logits.begin(),
                          row.logits.end());
  };
  auto rank =
      Rank::Create(*spec, joint ? plan : Apart(plan),
                   joint ? static_cast<WeightSource*>(source->get()) : &apart,
                   options, nullptr);
  KVASIR_EXPECT_OK(rank);
  if (!rank.ok()) return outcome;
  DirectRunner runner(&(*rank)->executor(), &(*rank)->layout(),
                      (*rank)->pages());
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kTokens; ++i) {
    ids.push_back(static_cast<int32_t>((i * i + 37 * i + 5) % 1237));
  }
  for (int64_t done = 0; done < kTokens;) {
    const bool prompt = done < kPromptTokens;
    const int64_t count = prompt ? kPromptTokens / 4 : 1;
    KVASIR_EXPECT_OK(
        runner.Run({{.sequence_id = 1,
                     .token_ids = absl::MakeConstSpan(ids).subspan(
                         static_cast<size_t>(done), static_cast<size_t>(count)),
                     .output = !prompt}}));
    done += count;
  }
  const cache::PageLayout& layout = (*rank)->layout();
  outcome.bytes_per_token = layout.marginal_payload_bytes_per_token();
  outcome.side_pages = layout.page_groups()[0].side_pages_per_sequence;
  outcome.static_codes = (*rank)->executor().totals().static_codes;
  return outcome;
}

class JointPartTest : public ::testing::TestWithParam<FamilyCase> {};

TEST_P(JointPartTest,
       KeysAndValuesInOnePartGiveTheLogitsOfSeparatePartsInHalfTheBytes) {
  const Outcome joint = RunText(GetParam(), true);
  const Outcome apart = RunText(GetParam(), false);
  EXPECT_EQ(joint.logits, apart.logits);
  EXPECT_EQ(2 * joint.bytes_per_token, apart.bytes_per_token);
  EXPECT_EQ(2 * joint.static_codes, apart.static_codes);
  EXPECT_EQ(joint.side_pages > 0, GetParam().plan_case.key_exact > 0);
  EXPECT_EQ(apart.side_pages > 0, joint.side_pages > 0);
}

std::vector<FamilyCase> JointCases() {
  std::vector<FamilyCase> cases;
  for (const PlanCase& each : PlanCases()) cases.push_back({TinyShape(), each});
  for (FamilyCase& each : FamilyCases(kWindow)) {
    cases.push_back(std::move(each));
  }
  std::erase_if(cases, [](const FamilyCase& each) {
    // "KeyAndValue" has a higher rank than a separate key or value part may
    // have.
    return each.plan_case.joint.empty() || each.plan_case.name == "KeyAndValue";
  });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, JointPartTest,
                         ::testing::ValuesIn(JointCases()),
                         [](const auto& test) {
                           return test.param.plan_case.name;
                         });

}  // namespace
}  // namespace kvasir::worker
