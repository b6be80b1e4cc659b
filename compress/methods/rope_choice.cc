#include "compress/methods/rope_choice.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace kvasir::compress {
namespace {

// A complex channel of a group. SortedTerms puts channels in order of falling
// energy. Channels with equal energy are ordered by pair, and then by their
// index in the pair.
struct Term {
  double energy = 0;
  size_t pair = 0;
};
std::vector<Term> SortedTerms(const PairEnergies& energies) {
  std::vector<Term> terms;
  for (size_t pair = 0; pair < energies.size(); ++pair) {
    for (const double energy : energies[pair]) terms.push_back({energy, pair});
  }
  std::stable_sort(
      terms.begin(), terms.end(),
      [](const Term& a, const Term& b) { return a.energy > b.energy; });
  return terms;
}

}  // namespace

std::vector<int64_t> BestIndices(const std::vector<double>& scores,
                                 int64_t count) {
  std::vector<int64_t> indices(scores.size());
  std::iota(indices.begin(), indices.end(), 0);
  std::stable_sort(indices.begin(), indices.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  indices.resize(static_cast<size_t>(count));
  std::sort(indices.begin(), indices.end());
  return indices;
}

std::vector<int64_t> BestTerms(const PairEnergies& energies, int64_t count) {
  const std::vector<Term> terms = SortedTerms(energies);
  std::vector<int64_t> kept(energies.size(), 0);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    ++kept[terms[i].pair];
  }
  return kept;
}

std::vector<int64_t> ShareChannels(const std::vector<PairEnergies>& groups,
                                   int64_t step, int64_t total) {
  struct Queue {
    std::vector<Term> terms;
    int64_t taken = 0;
    int64_t next(int64_t block) const {
      return std::min(block, static_cast<int64_t>(terms.size()) - taken);
    }
  };
  std::vector<Queue> queues;
  int64_t left = total;
  for (const PairEnergies& group : groups) {
    queues.push_back({SortedTerms(group)});
    queues.back().taken = queues.back().next(step);
    left -= queues.back().taken;
  }
  KVASIR_CHECK(left >= 0);
  const auto energy_per_channel = [&](const Queue& queue, int64_t block) {
    double sum = 0;
    for (int64_t i = queue.taken; i < queue.taken + block; ++i) {
      sum += queue.terms[static_cast<size_t>(i)].energy;
    }
    return sum / static_cast<double>(block);
  };
  for (;;) {
    Queue* best = nullptr;
    double best_energy = 0;
    for (Queue& queue : queues) {
      const int64_t block = queue.next(step);
      if (block == 0 || block > left) continue;
      const double energy = energy_per_channel(queue, block);
      if (best == nullptr || energy > best_energy) {
        best = &queue;
        best_energy = energy;
      }
    }
    if (best == nullptr) break;
    const int64_t block = best->next(step);
    best->taken += block;
    left -= block;
  }
  std::vector<int64_t> counts;
  for (const Queue& queue : queues) counts.push_back(queue.taken);
  return counts;
}

}  // namespace kvasir::compress
