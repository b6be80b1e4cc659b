#include "worker/executor/attention/key_bias_split.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace kvasir::worker {
namespace {

using kernels::KeyBiasPair;

constexpr double kMostTileTurn = 0.1;  // in radians
constexpr size_t kExactPairs = 4;
static_assert(kExactPairs <= kernels::kMostExactPairs);

// Returns how far a pair turns in half a tile, in radians. `step` is its angle
// per position, in units of 2^-64 turns.
double TurnInTile(uint64_t step) {
  constexpr double kTwoPi = 6.283185307179586;
  // A step above half a turn stands for a turn in the other direction.
  const uint64_t size = std::min(step, uint64_t{0} - step);
  return std::ldexp(static_cast<double>(size), -64) * kTwoPi *
         static_cast<double>(kernels::kKeyBiasTile / 2);
}

// Returns the bias of each pair of one head.
std::vector<KeyBiasPair> PairsOf(const float* bias, const KeyTurns& turns) {
  const auto num_pairs = static_cast<int32_t>(turns.steps.size());
  std::vector<KeyBiasPair> pairs;
  for (int32_t p = 0; p < num_pairs; ++p) {
    const bool halves = turns.pairing == kernels::RopePairing::kHalfSplit;
    KeyBiasPair& pair = pairs.emplace_back();
    pair.first = halves ? p : 2 * p;
    pair.second = halves ? p + num_pairs : 2 * p + 1;
    pair.bias_first = bias[pair.first] * turns.attention_factor;
    pair.bias_second = bias[pair.second] * turns.attention_factor;
    pair.step = turns.steps[static_cast<size_t>(p)];
  }
  return pairs;
}

bool IsZero(const KeyBiasPair& pair) {
  return pair.bias_first == 0.0f && pair.bias_second == 0.0f;
}

// Returns the length of the vector that the pair's bias would leave in cached
// keys if the pair were not an exact pair.
double Residue(const KeyBiasPair& pair) {
  const double turn = TurnInTile(pair.step);
  return std::hypot(static_cast<double>(pair.bias_first),
                    static_cast<double>(pair.bias_second)) *
         (turn <= kMostTileTurn ? turn : 1.0);
}

// Returns the indices of the pairs with the largest residues, ascending.
std::vector<size_t> ExactOf(const std::vector<KeyBiasPair>& pairs) {
  std::vector<std::pair<double, size_t>> order;
  for (size_t p = 0; p < pairs.size(); ++p) {
    if (!IsZero(pairs[p])) order.emplace_back(-Residue(pairs[p]), p);
  }
  const size_t count = std::min(kExactPairs, order.size());
  std::partial_sort(order.begin(),
                    order.begin() + static_cast<std::ptrdiff_t>(count),
                    order.end());
  std::vector<size_t> exact;
  for (size_t i = 0; i < count; ++i) exact.push_back(order[i].second);
  std::sort(exact.begin(), exact.end());
  return exact;
}

}  // namespace

KeyBiasSplit SplitKeyBias(absl::Span<const float> bias, int64_t head_dim,
                          const KeyTurns& turns) {
  KeyBiasSplit split;
  split.cached.assign(bias.size(), 0.0f);
  std::vector<std::vector<KeyBiasPair>> heads;
  std::vector<std::vector<size_t>> exact;
  // For each pair, whether it is a tile pair of any head. All heads then store
  // it as a tile pair, because all heads use the same angles.
  std::vector<bool> in_tile(turns.steps.size(), false);
  for (size_t at = 0; at < bias.size(); at += static_cast<size_t>(head_dim)) {
    const std::vector<KeyBiasPair>& pairs =
        heads.emplace_back(PairsOf(bias.data() + at, turns));
    exact.push_back(ExactOf(pairs));
    split.exact_pairs =
        std::max(split.exact_pairs, static_cast<int64_t>(exact.back().size()));
    for (size_t p = 0; p < pairs.size(); ++p) {
      const bool is_exact =
          std::binary_search(exact.back().begin(), exact.back().end(), p);
      if (is_exact || IsZero(pairs[p])) continue;
      if (TurnInTile(pairs[p].step) <= kMostTileTurn) {
        in_tile[p] = true;
        continue;
      }
      for (const int32_t i : {pairs[p].first, pairs[p].second}) {
        split.cached[at + static_cast<size_t>(i)] =
            bias[at + static_cast<size_t>(i)];
      }
    }
  }
  split.tile_pairs = std::count(in_tile.begin(), in_tile.end(), true);
  for (size_t j = 0; j < heads.size(); ++j) {
    for (size_t p = 0; p < in_tile.size(); ++p) {
      if (!in_tile[p]) continue;
      KeyBiasPair& pair = split.pairs.emplace_back(heads[j][p]);
      if (std::binary_search(exact[j].begin(), exact[j].end(), p)) {
        pair.bias_first = 0.0f;
        pair.bias_second = 0.0f;
      }
    }
    for (const size_t p : exact[j]) split.pairs.push_back(heads[j][p]);
    // A head with fewer exact pairs than others gets pairs without a bias.
    for (auto e = static_cast<int64_t>(exact[j].size()); e < split.exact_pairs;
         ++e) {
      KeyBiasPair& pair = split.pairs.emplace_back(heads[j][0]);
      pair.bias_first = 0.0f;
      pair.bias_second = 0.0f;
    }
  }
  return split;
}

float ScaleToUnits(std::vector<KeyBiasPair>* pairs) {
  float longest = 0.0f;
  for (const KeyBiasPair& pair : *pairs) {
    longest = std::max(longest, std::hypot(pair.bias_first, pair.bias_second));
  }
  int exponent = 0;
  std::frexp(longest, &exponent);  // longest < 2^exponent
  const float unit = std::ldexp(1.0f, exponent);
  for (KeyBiasPair& pair : *pairs) {
    pair.bias_first /= unit;
    pair.bias_second /= unit;
  }
  return unit;
}

}  // namespace kvasir::worker
