// Shares bytes out to channels, parts and layers, so that the predicted loss is
// least. Exact: dynamic programming over bytes as pages count them, padding
// included, so that nothing is left for a search to miss. No libtorch.
//
//   channels of a part  widths that fall from group to group: LossByBytes
//   parts of a layer    key and value, or one part for both: Together, Either
//   layers              Together
//
// Units: losses are nats per token; bytes are counted in grains, the least step
// that a latent's bytes in a page can take.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace kvasir::compress {

// Bits that a channel may have, from the most.
inline constexpr std::array<int, 8> kCodeWidths = {8, 6, 5, 4, 3, 2, 1, 0};

inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// Channels that have one width, in each latent of a part.
struct ChannelGroup {
  int64_t channels = 0;                              // of one latent
  std::array<double, kCodeWidths.size()> loss = {};  // over all latents
};

// What shares one list of widths: the latents of a part, all alike.
struct PartChannels {
  // By falling variance, which is the order of their widths.
  std::vector<ChannelGroup> groups;
  int64_t latents = 1;
  int64_t grain_bytes = 1;
  // Of a latent, beside its codes.
  int64_t param_bytes = 0;
  // Added for each channel of a latent that has bits: what its time is worth.
  double loss_per_channel = 0;
};

// Least loss by grains: entry i is that of at most i grains over all latents,
// kImpossible where there is no way; ends where every channel has all bits.
// Some channel has bits.
std::vector<double> LossByBytes(const PartChannels& part);

// The widths behind entry `grains`, one for each group.
std::vector<int> WidthsFor(const PartChannels& part, int64_t grains);

// Grains that such widths take in pages, over all latents.
int64_t GrainsOf(const PartChannels& part, const std::vector<int>& widths);

// Ways to spend bytes, and the least loss of each number of them. Immutable;
// copies share what is below them.
class ByteChoice {
 public:
  // `leaf`: names it in a Take.
  static ByteChoice Leaf(int leaf, std::vector<double> loss);
  // One of them.
  static ByteChoice Either(std::vector<ByteChoice> options);
  // All of them; at most `max_grains` are looked at.
  static ByteChoice Together(const std::vector<ByteChoice>& parts,
                             int64_t max_grains);

  // As LossByBytes.
  const std::vector<double>& loss() const;
  // Fewest grains that do; -1: none in sight.
  int64_t least_grains() const;

  struct Take {
    int leaf = 0;
    int64_t grains = 0;
  };
  // The leaves that are taken for `grains`, in order, with theirs. Loss is not
  // kImpossible there (CHECK); more grains than there are entries count as the
  // last.
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
