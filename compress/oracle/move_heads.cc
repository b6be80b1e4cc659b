#include "compress/oracle/move_heads.h"

#include <array>

namespace kvasir::compress {

// Rotates each head from position `from` to position `to` in one rotation,
// whose angle is the difference of the two angles.
at::Tensor MoveHeads(const LayerProgram& program, const Rotation& rotation,
                     const at::Tensor& heads, const std::vector<int64_t>& unit,
                     const at::Tensor& from, const at::Tensor& to) {
  if (!program.rotates) return heads;
  const auto [cos_from, sin_from, cos_to, sin_to] = std::array<at::Tensor, 4>{
      rotation.cos.index_select(0, from), rotation.sin.index_select(0, from),
      rotation.cos.index_select(0, to), rotation.sin.index_select(0, to)};
  // The square of YaRN's attention factor, by which both tables are multiplied.
  // `heads` already contain the factor, so the products below are divided by
  // its square.
  const at::Tensor factor = cos_from.square() + sin_from.square();
  const at::Tensor cos = (cos_to * cos_from + sin_to * sin_from) / factor;
  const at::Tensor sin = (sin_to * cos_from - cos_to * sin_from) / factor;
  std::vector<at::Tensor> pieces;
  int64_t begin = 0;
  const auto next = [&](int64_t width) {
    begin += width;
    return heads.slice(-1, begin - width, begin);
  };
  if (program.has_plain_key) {
    pieces.push_back(Rotate(next(program.spec.head_dim),
                            {cos, sin, program.spec.rope.pairing}));
  }
  for (const ProgramPart& part : program.key) {
    if (!part.folds) continue;
    pieces.push_back(next(part.widest_latent));
    if (part.space != plan::Space::kRopeLowRank) continue;
    const at::Tensor pairs =
        part.head_channel_pairs.view({program.spec.num_kv_heads, -1})
            .index_select(0, at::tensor(unit, at::kLong).to(from.device()));
    const auto selected = [&](const at::Tensor& table) {
      at::Tensor by_head = table.index_select(1, pairs.flatten())
                               .view({table.size(0), pairs.size(0), -1})
                               .permute({1, 0, 2});
      return heads.dim() == 4 ? by_head.unsqueeze(1) : by_head;
    };
    pieces.back() = Rotate(pieces.back(), {selected(cos), selected(sin),
                                           model::RopePairing::kHalfSplit});
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, -1);
}

}  // namespace kvasir::compress
