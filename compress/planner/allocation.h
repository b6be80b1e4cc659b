// Distributes bytes over channels, parts and layers so that the predicted loss
// is as small as possible. Dynamic programming finds the exact optimum. Bytes
// include the padding of pages. Does not use libtorch.
//
// - Each channel of a part gets a bit width. Widths never grow from one group
//   of channels to the next (LossByBytes).
// - Each layer has a key part and a value part (ByteChoice::Together), or a
//   joint part instead of both (ByteChoice::Either).
// - All layers share the bytes (ByteChoice::Together).
//
// Units: losses are nats per token. Bytes are counted in grains. A grain is the
// smallest step by which the bytes of a latent in a page can grow.
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

// Channels of a part that share one bit width. Each latent of the part has the
// same number of them.
struct ChannelGroup {
  int64_t channels = 0;  // number of channels in one latent
  // loss[i]: loss of the group in all latents together if it has
  // kCodeWidths[i] bits
  std::array<double, kCodeWidths.size()> loss = {};
};

// The channels of a part. All latents of the part have the same groups and the
// same widths.
struct PartChannels {
  // In order of falling variance. A group's width is never larger than that of
  // the group before.
  std::vector<ChannelGroup> groups;
  int64_t latents = 1;
  int64_t grain_bytes = 1;
  // Bytes that a latent takes per token in addition to its codes.
  int64_t param_bytes = 0;
  // The time that a channel takes, converted to a loss. It is added for each
  // channel with at least one bit.
  double loss_per_channel = 0;
};

// Returns the least loss for each number of bytes. Entry i is the least loss
// with at most i grains for all latents together, or kImpossible if there is no
// solution. At least one channel must have bits. In the last entry, the grains
// suffice for the largest width in every channel.
std::vector<double> LossByBytes(const PartChannels& part);

// Returns the widths of the groups with which entry `grains` of LossByBytes is
// reached.
std::vector<int> WidthsFor(const PartChannels& part, int64_t grains);

// Returns the number of grains that all latents together take in a page if
// their groups have these widths.
int64_t GrainsOf(const PartChannels& part, const std::vector<int>& widths);

// A tree of the possible ways to spend bytes. It gives the least loss for each
// number of bytes. Immutable; copies share nodes.
class ByteChoice {
 public:
  // Makes a leaf with the losses of LossByBytes. `leaf` is the number that
  // identifies the leaf in a Take.
  static ByteChoice Leaf(int leaf, std::vector<double> loss);
  // Makes a node that takes exactly one of its options.
  static ByteChoice Either(std::vector<ByteChoice> options);
  // Makes a node that takes all of its parts, with at most `max_grains` for all
  // of them together.
  static ByteChoice Together(const std::vector<ByteChoice>& parts,
                             int64_t max_grains);

  // The least loss for each number of grains, as LossByBytes returns it.
  const std::vector<double>& loss() const;
  // The smallest number of grains for which there is a solution; -1 if there is
  // none.
  int64_t least_grains() const;

  struct Take {
    int leaf = 0;
    int64_t grains = 0;
  };
  // Returns the leaves that give the least loss if `grains` are spent, in
  // order, with the grains of each. If `grains` is beyond the end of loss(),
  // the last entry is used. The entry must not be kImpossible (CHECK).
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
