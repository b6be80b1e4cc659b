// Palu: stores keys and values of groups of KV heads as low-rank latents, whose
// ranks are chosen by Fisher information. With the search kUniform it is the
// baseline for other ways to choose ranks.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How the kept numbers are distributed over the key and value groups of all
// layers.
enum class RankSearch {
  kFisher,  // by each group's own Fisher information
  // by the Fisher information of whole projections; all groups of a projection
  // get the same rank
  kModule,
  kUniform,  // the same kept share everywhere
};
absl::StatusOr<RankSearch> ParseRankSearch(const std::string& name);
std::string RankSearchName(RankSearch search);

// How the Fisher information of a group's weights becomes the group's score.
// Both kinds sum over the weights. Means would give the same ratios between
// groups of equal size.
enum class FisherScore {
  // sum of the square roots of the mean squared gradients, as in the paper's
  // public code
  kMeanRoot,
  kSum,  // sum of the mean squared gradients, as in the paper's text
};
absl::StatusOr<FisherScore> ParseFisherScore(const std::string& name);
std::string FisherScoreName(FisherScore score);

struct PaluOptions {
  // Number of KV heads that share a latent: 1 (M-LRD), several (G-LRD), or 0
  // for all heads of a tensor-parallel rank (J-LRD).
  int64_t group_heads = 4;
  RankSearch search = RankSearch::kFisher;
  FisherScore score = FisherScore::kMeanRoot;
  Decomposition decomposition = Decomposition::kWhitened;
  // Rotates every latent by a Hadamard matrix that is fused into its factors.
  // This lowers the error of codes with few bits and changes nothing else.
  bool hadamard = false;
};

// Makes a plan. Keys that rotate are rebuilt before their rotation. Values, and
// key dims that do not rotate, are not rebuilt: their lift is absorbed by FOLD
// or AT_RUNTIME, whichever reads fewer weights. If RoPE rotates only a part of
// each head, keys have two parts with separate ranks. At most `keep` times the
// dense numbers are kept, and the rest of this budget is too small for the next
// rank step of any group (AllocateRanks). Keys or values at full rank and
// without codes get no lift. The plan's method is "palu" or "uniform".
// Errors: INVALID_ARGUMENT for a group size that does not divide the number of
//   KV heads (of a tensor-parallel rank), and for a `keep` too small for the
//   least ranks; FAILED_PRECONDITION if the search needs a calibration with
//   Fisher information and there is none.
absl::StatusOr<kvasir::v1::KvPlan> PlanPalu(const PlanRequest& request,
                                            const PaluOptions& options);

}  // namespace kvasir::compress
