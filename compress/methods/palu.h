// Palu: stores keys and values of groups of KV heads as low-rank latents, with
// ranks by Fisher information. Its uniform search is the baseline of every rank
// search.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How the budget is distributed over the key and value groups of all layers.
enum class RankSearch {
  kFisher,   // one pool over all groups
  kModule,   // one pool over the projections: equal ranks inside each
  kUniform,  // the same kept share everywhere
};
absl::StatusOr<RankSearch> ParseRankSearch(const std::string& name);
std::string RankSearchName(RankSearch search);

// How the Fisher information of a group's weights becomes one score. Both sum
// over the group's weights: between groups of equal size, means have the same
// ratios.
enum class FisherScore {
  kMeanRoot,  // the root of each squared gradient, as in the paper's public
              // code
  kSum,       // the squared gradients, as in the paper's text
};
absl::StatusOr<FisherScore> ParseFisherScore(const std::string& name);
std::string FisherScoreName(FisherScore score);

struct PaluOptions {
  // KV heads that share a latent: 1 (M-LRD), some (G-LRD), or 0 for all heads
  // of a tensor-parallel rank (J-LRD).
  int64_t group_heads = 4;
  RankSearch search = RankSearch::kFisher;
  FisherScore score = FisherScore::kMeanRoot;
  Decomposition decomposition = Decomposition::kWhitened;
  // Rotates every latent by a Hadamard matrix that is fused into its factors,
  // which helps codes of few bits. Changes nothing else.
  bool hadamard = false;
};

// Keys are rebuilt before their rotation. Values, and keys and dims that do not
// rotate, are absorbed: FOLD or AT_RUNTIME, whichever reads fewer weight bytes.
// A partially rotary head becomes two key parts with ranks of their own. The
// kept numbers are at most `keep` times the dense ones, and below that by less
// than any group's next step (AllocateRanks). A side that is kept whole is
// stored as it is, in numbers. Method "palu" or "uniform".
// Errors: INVALID_ARGUMENT for group sizes that do not divide the KV heads (of
//   a rank), and for a `keep` below the least ranks; FAILED_PRECONDITION if the
//   search needs a calibration with Fisher information.
absl::StatusOr<kvasir::v1::KvPlan> PlanPalu(const PlanRequest& request,
                                            const PaluOptions& options);

}  // namespace kvasir::compress
