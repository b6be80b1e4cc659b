#include "compress/oracle/key_bias.h"

#include <algorithm>
#include <vector>

namespace kvasir::compress {
namespace {

constexpr int64_t kTile = 64;
constexpr double kMostTileTurn = 0.1;  // in radians
constexpr int64_t kExactPairs = 4;

}  // namespace

at::Tensor BiasOutsideOfCodes(const model::RopeSpec& rope,
                              const at::Tensor& bias, int64_t num_kv_heads,
                              int64_t num_positions) {
  const auto doubles = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor heads =
      bias.detach().to(at::kCPU, at::kDouble).view({num_kv_heads, -1});
  const int64_t pairs = rope.rotary_dim / 2;
  const bool halves = rope.pairing == model::RopePairing::kHalfSplit;
  const at::Tensor index = at::arange(pairs);
  const at::Tensor first = halves ? index : 2 * index;
  const at::Tensor second = halves ? index + pairs : 2 * index + 1;
  const at::Tensor b0 =
      heads.index_select(1, first) * rope.attention_factor;  // [Hkv, pairs]
  const at::Tensor b1 = heads.index_select(1, second) * rope.attention_factor;

  const at::Tensor frequencies = at::tensor(rope.frequencies, doubles);
  const at::Tensor turn = frequencies * static_cast<double>(kTile / 2);
  const at::Tensor is_slow = turn <= kMostTileTurn;  // [pairs]
  const at::Tensor residue =
      at::hypot(b0, b1) * at::where(is_slow, turn, at::ones_like(turn));
  at::Tensor is_exact = at::zeros({num_kv_heads, pairs}, at::kBool);
  const int64_t exact = std::min(kExactPairs, pairs);
  is_exact.scatter_(1, std::get<1>(residue.topk(exact, 1)), true);

  const at::Tensor positions = at::arange(num_positions);
  const at::Tensor centres =
      at::floor_divide(positions, kTile) * kTile + kTile / 2;
  const auto rotated = [&](const at::Tensor& from) {
    const at::Tensor angle = at::outer(from.to(at::kDouble), frequencies);
    const at::Tensor c = angle.cos().unsqueeze(1);  // [T, 1, pairs]
    const at::Tensor s = angle.sin().unsqueeze(1);
    return std::pair(b0 * c - b1 * s, b1 * c + b0 * s);
  };
  const auto [centre0, centre1] = rotated(centres);
  const auto [exact0, exact1] = rotated(positions);
  const at::Tensor none = at::zeros({}, doubles);
  const auto pick = [&](const at::Tensor& own, const at::Tensor& of_tile) {
    return at::where(is_exact, own, at::where(is_slow, of_tile, none));
  };
  at::Tensor out = heads.expand({num_positions, -1, -1}).clone();
  out.index_copy_(2, first, pick(exact0, centre0));
  out.index_copy_(2, second, pick(exact1, centre1));
  return out.to(bias.options());
}

at::Tensor BiasOutsideOfPart(const LayerProgram& program,
                             const ProgramPart& part, const at::Tensor& bias,
                             int64_t num_positions) {
  if (!part.post_rope || !program.rotates) return bias.unsqueeze(0);
  return BiasOutsideOfCodes(program.spec.rope, bias, program.spec.num_kv_heads,
                            num_positions)
      .flatten(1);
}

}  // namespace kvasir::compress
