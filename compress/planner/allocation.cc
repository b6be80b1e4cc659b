#include "compress/planner/allocation.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace kvasir::compress {
namespace {

// A table of the least loss of a part for each possible size of a latent's
// codes. Sizes are in units of gcd(channels of all groups) bits.
class WidthTable {
 public:
  explicit WidthTable(const PartChannels& part) : part_(part) {
    KVASIR_CHECK(!part.groups.empty() && part.grain_bytes > 0 &&
                 part.latents > 0);
    for (const ChannelGroup& group : part.groups) {
      unit_bits_ = std::gcd(unit_bits_, group.channels);
      channels_ += group.channels;
    }
    num_units_ = channels_ / unit_bits_ * kCodeWidths[0] + 1;
    Fill();
  }

  // Returns how many units are left for the codes of each latent if all latents
  // together get `grains`. Returns -1 if not even the parameters fit.
  int64_t UnitsIn(int64_t grains) const {
    const int64_t bytes =
        grains / part_.latents * part_.grain_bytes - ParamGrainBytes();
    if (bytes < 0) return -1;
    return std::min(bytes * 8 / unit_bits_, num_units_ - 1);
  }
  // Returns the number of grains that are needed if every channel has the
  // largest width.
  int64_t MostGrains() const {
    const int64_t codes = (channels_ * kCodeWidths[0] + 7) / 8;
    return part_.latents *
           ((codes + part_.grain_bytes - 1) / part_.grain_bytes +
            ParamGrainBytes() / part_.grain_bytes);
  }

  double LossOf(int64_t units) const {
    return units < 0 ? kImpossible : loss_[At(kLast, Groups(), units)];
  }

  std::vector<int> WidthsOf(int64_t units) const {
    std::vector<int> widths(part_.groups.size());
    size_t width = kLast;
    size_t group = Groups();
    while (group > 0) {
      const double loss = loss_[At(width, group, units)];
      if (width > 0 && loss == loss_[At(width - 1, group, units)]) {
        --width;
        continue;
      }
      --group;
      widths[group] = kCodeWidths[width];
      units -= Units(group, width);
    }
    return widths;
  }

 private:
  static constexpr size_t kLast = kCodeWidths.size() - 1;

  size_t Groups() const { return part_.groups.size(); }
  size_t At(size_t width, size_t group, int64_t units) const {
    return (width * (Groups() + 1) + group) * static_cast<size_t>(num_units_) +
           static_cast<size_t>(units);
  }
  int64_t Units(size_t group, size_t width) const {
    return part_.groups[group].channels / unit_bits_ * kCodeWidths[width];
  }
  // Returns the bytes of the parameters, rounded up to whole grains, because a
  // page stores parameters in a region of their own.
  int64_t ParamGrainBytes() const {
    return (part_.param_bytes + part_.grain_bytes - 1) / part_.grain_bytes *
           part_.grain_bytes;
  }

  // Computes loss_[w][i][u]: the least loss of the first i groups in at most u
  // units if each of these groups has kCodeWidths[w] bits or more.
  void Fill() {
    loss_.assign(
        kCodeWidths.size() * (Groups() + 1) * static_cast<size_t>(num_units_),
        kImpossible);
    for (size_t width = 0; width <= kLast; ++width) {
      const bool stored = kCodeWidths[width] > 0;
      std::fill_n(loss_.begin() + static_cast<std::ptrdiff_t>(At(width, 0, 0)),
                  num_units_, 0.0);
      for (size_t i = 1; i <= Groups(); ++i) {
        const ChannelGroup& group = part_.groups[i - 1];
        const int64_t need = Units(i - 1, width);
        const double own = group.loss[width] +
                           (stored ? part_.loss_per_channel *
                                         static_cast<double>(group.channels)
                                   : 0.0);
        // The first group must have bits. Widths never grow from group to
        // group, so without them the part would store nothing.
        const bool may = stored || i > 1;
        for (int64_t u = 0; u < num_units_; ++u) {
          const double wider =
              width > 0 ? loss_[At(width - 1, i, u)] : kImpossible;
          const double taken = may && u >= need
                                   ? loss_[At(width, i - 1, u - need)] + own
                                   : kImpossible;
          loss_[At(width, i, u)] = std::min(wider, taken);
        }
      }
    }
  }

  const PartChannels& part_;
  int64_t unit_bits_ = 0;
  int64_t channels_ = 0;
  int64_t num_units_ = 0;
  std::vector<double> loss_;
};

}  // namespace

std::vector<double> LossByBytes(const PartChannels& part) {
  const WidthTable table(part);
  std::vector<double> loss;
  for (int64_t grains = 0; grains <= table.MostGrains(); ++grains) {
    loss.push_back(table.LossOf(table.UnitsIn(grains)));
  }
  return loss;
}

std::vector<int> WidthsFor(const PartChannels& part, int64_t grains) {
  const WidthTable table(part);
  const int64_t units = table.UnitsIn(grains);
  KVASIR_CHECK(table.LossOf(units) < kImpossible);
  return table.WidthsOf(units);
}

int64_t GrainsOf(const PartChannels& part, const std::vector<int>& widths) {
  const auto in_grains = [&part](int64_t bytes) {
    return (bytes + part.grain_bytes - 1) / part.grain_bytes;
  };
  int64_t bits = 0;
  for (size_t g = 0; g < widths.size(); ++g) {
    bits += part.groups[g].channels * widths[g];
  }
  return part.latents *
         (in_grains((bits + 7) / 8) + in_grains(part.param_bytes));
}

struct ByteChoice::Node {
  enum class Kind { kLeaf, kEither, kTogether };
  Kind kind = Kind::kLeaf;
  int leaf = 0;
  std::vector<double> loss;
  // The choice that gives the least loss for each number of grains. For kEither
  // it is the index of an option, for kTogether the grains of the first of two
  // nodes.
  std::vector<int32_t> from;
  std::vector<ByteChoice> below;
};

ByteChoice ByteChoice::Leaf(int leaf, std::vector<double> loss) {
  auto node = std::make_shared<Node>();
  node->leaf = leaf;
  node->loss = std::move(loss);
  return ByteChoice(std::move(node));
}

ByteChoice ByteChoice::Either(std::vector<ByteChoice> options) {
  KVASIR_CHECK(!options.empty());
  if (options.size() == 1) return options[0];
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kEither;
  size_t entries = 0;
  for (const ByteChoice& option : options) {
    entries = std::max(entries, option.loss().size());
  }
  node->loss.assign(entries, kImpossible);
  node->from.assign(entries, 0);
  for (size_t o = 0; o < options.size(); ++o) {
    const std::vector<double>& loss = options[o].loss();
    for (size_t i = 0; i < entries; ++i) {
      const double own = loss[std::min(i, loss.size() - 1)];
      if (own >= node->loss[i]) continue;
      node->loss[i] = own;
      node->from[i] = static_cast<int32_t>(o);
    }
  }
  node->below = std::move(options);
  return ByteChoice(std::move(node));
}

ByteChoice ByteChoice::Pair(const ByteChoice& first, const ByteChoice& second,
                            int64_t max_grains) {
  const std::vector<double>& a = first.loss();
  const std::vector<double>& b = second.loss();
  const int64_t least = second.least_grains();
  const size_t entries =
      std::min(a.size() + b.size() - 1, static_cast<size_t>(max_grains) + 1);
  auto node = std::make_shared<Node>();
  node->kind = Node::Kind::kTogether;
  node->loss.assign(entries, kImpossible);
  node->from.assign(entries, 0);
  for (size_t j = static_cast<size_t>(std::max<int64_t>(least, 0));
       least >= 0 && j < b.size() && j < entries; ++j) {
    for (size_t i = 0; i < a.size() && i + j < entries; ++i) {
      const double sum = a[i] + b[j];
      if (sum >= node->loss[i + j]) continue;
      node->loss[i + j] = sum;
      node->from[i + j] = static_cast<int32_t>(i);
    }
  }
  node->below = {first, second};
  return ByteChoice(std::move(node));
}

ByteChoice ByteChoice::Together(const std::vector<ByteChoice>& parts,
                                int64_t max_grains) {
  KVASIR_CHECK(!parts.empty());
  ByteChoice all = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    all = Pair(all, parts[i], max_grains);
  }
  return all;
}

const std::vector<double>& ByteChoice::loss() const { return node_->loss; }

int64_t ByteChoice::least_grains() const {
  for (size_t i = 0; i < loss().size(); ++i) {
    if (loss()[i] < kImpossible) return static_cast<int64_t>(i);
  }
  return -1;
}

void ByteChoice::Trace(int64_t grains, std::vector<Take>* takes) const {
  const int64_t last = static_cast<int64_t>(loss().size()) - 1;
  const auto at = static_cast<size_t>(std::min(grains, last));
  switch (node_->kind) {
    case Node::Kind::kLeaf:
      takes->push_back({node_->leaf, static_cast<int64_t>(at)});
      return;
    case Node::Kind::kEither:
      node_->below[static_cast<size_t>(node_->from[at])].Trace(grains, takes);
      return;
    case Node::Kind::kTogether: {
      const int64_t first = node_->from[at];
      node_->below[0].Trace(first, takes);
      node_->below[1].Trace(static_cast<int64_t>(at) - first, takes);
    }
  }
}

std::vector<ByteChoice::Take> ByteChoice::Choose(int64_t grains) const {
  KVASIR_CHECK(grains >= 0);
  const size_t at = std::min(static_cast<size_t>(grains), loss().size() - 1);
  KVASIR_CHECK(loss()[at] < kImpossible);
  std::vector<Take> takes;
  Trace(static_cast<int64_t>(at), &takes);
  return takes;
}

}  // namespace kvasir::compress
