#include "worker/ranks/key_means.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "kernels/device/dtype.h"

namespace kvasir::worker {
namespace {

// A part of KeyMeansId. Change it if means are measured in another way.
constexpr char kMethod[] = "1\n";

// The first tokens of a text are left out, because many models give them
// unusual keys. Plans keep such tokens exact (LayerPlan.exact_sinks).
constexpr size_t kSkippedTokens = 4;
// RunTokens runs all tokens in one step.
static_assert(kKeyMeanTokens <= kTextStepTokens);

using Sums = std::vector<std::vector<double>>;  // by layer, [Hkv, D]

absl::Status RunTokens(const TextRank& rank,
                       absl::Span<const int32_t> token_ids,
                       DirectRunner& runner, bool* finite) {
  const absl::Status step =
      runner.Run({{.sequence_id = 1, .token_ids = token_ids}}).status();
  KVASIR_RETURN_IF_ERROR(rank.collective->status());
  // After a step that has run, an error means that its results are not finite.
  // All ranks of a group detect this in the same step.
  if (runner.length(1) == 0 && !step.ok()) return step;
  *finite = step.ok();
  return absl::OkStatus();
}

}  // namespace

std::string KeyMeansId(absl::Span<const int32_t> token_ids) {
  return base::Sha256Hex(absl::StrCat(kMethod, absl::StrJoin(token_ids, ",")));
}

bool CanMeasureWith(const model::DecoderSpec& spec,
                    absl::Span<const int32_t> token_ids) {
  return token_ids.size() > kSkippedTokens &&
         token_ids.size() <= static_cast<size_t>(kKeyMeanTokens) &&
         std::all_of(token_ids.begin(), token_ids.end(), [&](int32_t id) {
           return id >= 0 && id < spec.vocab_size;
         });
}

absl::StatusOr<bool> MeasureKeyMeans(const TextRank& rank,
                                     absl::Span<const int32_t> token_ids,
                                     ModelWeights* weights) {
  if (!CanMeasureWith(*rank.spec, token_ids)) return false;
  const std::shared_ptr<const ServedPlan> own = weights->plan;
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const ServedPlan> dense,
                          ServeDensePlan(rank));
  if (!HaveEqualWeights(*own, *dense)) return false;
  const size_t count = token_ids.size() - kSkippedTokens;
  Sums sums(weights->layers.size());
  const auto add = [&](int64_t layer, absl::Span<const float> keys) {
    std::vector<double>& sum = sums[static_cast<size_t>(layer)];
    sum.resize(keys.size() / token_ids.size());
    for (size_t i = kSkippedTokens * sum.size(); i < keys.size(); ++i) {
      sum[i % sum.size()] += static_cast<double>(keys[i]);
    }
  };
  bool finite = true;
  KVASIR_RETURN_IF_ERROR(RunText(
      rank, dense, static_cast<int64_t>(token_ids.size()), {.keys = add},
      [&](DirectRunner& runner) {
        return RunTokens(rank, token_ids, runner, &finite);
      },
      weights));
  UsePrograms(own, weights);
  if (!finite) return false;
  for (size_t layer = 0; layer < sums.size(); ++layer) {
    auto mean = std::make_shared<std::vector<float>>();
    for (const double sum : sums[layer]) {
      mean->push_back(kernels::ToFloat(kernels::ToBf16(
          static_cast<float>(sum / static_cast<double>(count)))));
    }
    weights->layers[layer].key_mean = std::move(mean);
  }
  return true;
}

}  // namespace kvasir::worker
