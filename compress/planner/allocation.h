// Distributes bytes over channels, parts and layers so that the predicted loss
// is least. The result is exact: dynamic programming over bytes as pages count
// them, including padding. Without libtorch.
//
//   channels of a part  widths that fall from group to group: LossByBytes
//   parts of a layer    key and value, or one part for both: Together, Either
//   layers              Together
//
// Units: losses are nats per token. Bytes are counted in grains; a grain is the
// smallest step in which the bytes of a latent in a page can grow.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace kvasir::compress {

// The bit widths that a channel may have, in falling order.
inline constexpr std::array<int, 8> kCodeWidths = {8, 6, 5, 4, 3, 2, 1, 0};

inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// Channels that share a width, in each latent of a part.
struct ChannelGroup {
  int64_t channels = 0;                              // of one latent
  std::array<double, kCodeWidths.size()> loss = {};  // over all latents
};

// The channels that share one list of widths: the latents of a part, which are
// all alike.
struct PartChannels {
  // By falling variance, in which order widths fall too.
  std::vector<ChannelGroup> groups;
  int64_t latents = 1;
  int64_t grain_bytes = 1;
  // Bytes of a latent in addition to its codes.
  int64_t param_bytes = 0;
  // Added for each channel of a latent that has bits: the loss that its time is
  // worth.
  double loss_per_channel = 0;
};

// Least loss by grains. Entry i is the least loss with at most i grains over
// all latents, kImpossible if there is no solution. At least one channel has
// bits. The list ends where every channel has all bits.
std::vector<double> LossByBytes(const PartChannels& part);

// The widths that give entry `grains`, one for each group.
std::vector<int> WidthsFor(const PartChannels& part, int64_t grains);

// Grains that these widths take in pages, over all latents.
int64_t GrainsOf(const PartChannels& part, const std::vector<int>& widths);

// Ways to spend bytes, with the least loss for each number of bytes. Immutable;
// copies share nodes.
class ByteChoice {
 public:
  // `leaf` identifies the leaf in a Take.
  static ByteChoice Leaf(int leaf, std::vector<double> loss);
  // Takes one of the options.
  static ByteChoice Either(std::vector<ByteChoice> options);
  // Takes all parts. Only up to `max_grains` are considered.
  static ByteChoice Together(const std::vector<ByteChoice>& parts,
                             int64_t max_grains);

  // As LossByBytes.
  const std::vector<double>& loss() const;
  // Fewest grains that have a solution; -1 if there is none.
  int64_t least_grains() const;

  struct Take {
    int leaf = 0;
    int64_t grains = 0;
  };
  // The leaves that are taken for `grains`, in order, with the grains of each.
  // The loss must not be kImpossible there (CHECK). More grains than there are
  // entries count as the last entry.
  std::vector<Take> Choose(int64_t grains) const;

 private:
  struct Node;

  explicit ByteChoice(std::shared_ptr<const Node> node)
      : node_(std::move(node)) {}
  static ByteChoice Pair(const ByteChoice& first, const ByteChoice& second,
                         int64_t max_grains);
  void Trace(int64_t grains, std::vector<Take>* takes) const;

  std::shared_ptr<const Node> node_;
};

}  // namespace kvasir::compress
