// Distributes bytes over channels, parts and layers so that the predicted loss
// is as small as possible. Dynamic programming finds the exact optimum. Bytes
// include the padding of pages. Does not use libtorch.
//
//   channels of a part bit widths that fall from group to group: LossByBytes
//   parts of a layer key and value parts, or a joint part: Together, Either
//   layers all of them: Together
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

// All bit widths that a channel may have, in falling order.
inline constexpr std::array<int, 8> kCodeWidths = {8, 6, 5, 4, 3, 2, 1, 0};

inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// Channels of each latent of a part that have the same bit width.
struct ChannelGroup {
  int64_t channels = 0;                              // number in one latent
  std::array<double, kCodeWidths.size()> loss = {};  // over all latents
};

// The channels of a part. All of its latents are alike and have the same
// widths.
struct PartChannels {
  // In order of falling variance. A group's width is never larger than that of
  // the group before.
  std::vector<ChannelGroup> groups;
  int64_t latents = 1;
  int64_t grain_bytes = 1;
  // Bytes that a latent takes per token in addition to its codes.
  int64_t param_bytes = 0;
  // Added to the loss for each channel of a latent that has bits, because it
  // costs time.
  double loss_per_channel = 0;
};

// Entry i of the result is the least loss with at most i grains for all latents
// together, or kImpossible if there is no solution. At least one channel has
// bits. The last entry is that at which every channel has the largest width.
std::vector<double> LossByBytes(const PartChannels& part);

// Returns the width of each group with which entry `grains` of LossByBytes is
// reached.
std::vector<int> WidthsFor(const PartChannels& part, int64_t grains);

// Number of grains that these widths take in pages, for all latents together.
int64_t GrainsOf(const PartChannels& part, const std::vector<int>& widths);

// A tree of choices how bytes can be spent, with the least loss for each number
// of bytes. Immutable; copies share nodes.
class ByteChoice {
 public:
  // A leaf with the losses of LossByBytes. `leaf` is its number in a Take.
  static ByteChoice Leaf(int leaf, std::vector<double> loss);
  // Exactly one of the options is taken.
  static ByteChoice Either(std::vector<ByteChoice> options);
  // All parts are taken. At most `max_grains` are distributed over them.
  static ByteChoice Together(const std::vector<ByteChoice>& parts,
                             int64_t max_grains);

  // The least loss by grains, as LossByBytes returns it.
  const std::vector<double>& loss() const;
  // The smallest number of grains for which there is a solution; -1 if there is
  // none.
  int64_t least_grains() const;

  struct Take {
    int leaf = 0;
    int64_t grains = 0;
  };
  // Returns the leaves that are taken for `grains`, in order, with the grains
  // of each. loss() must not be kImpossible for `grains` (CHECK). If loss() has
  // no such entry, the last one is used.
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
