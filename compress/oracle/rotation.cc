#include "compress/oracle/rotation.h"

#include <vector>

namespace kvasir::compress {

Rotation MakeRotation(const model::RopeSpec& rope, int64_t num_positions,
                      const at::TensorOptions& options,
                      int64_t first_position) {
  model::RopeSpec chosen = rope;
  model::ChooseRope(first_position + num_positions, &chosen);
  const auto doubles = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor angle = at::outer(
      at::arange(first_position, first_position + num_positions, doubles),
      at::tensor(chosen.frequencies, doubles));
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  const auto narrow = [&](const at::Tensor& table) {
    return (table * rope.attention_factor).to(options.device(), type);
  };
  return {narrow(angle.cos()), narrow(angle.sin())};
}

at::Tensor Rotate(const at::Tensor& heads, const Turn& turn) {
  const int64_t pairs = turn.cos.size(-1);
  const at::Tensor cos = turn.scale == 1.0 ? turn.cos : turn.cos * turn.scale;
  const at::Tensor sin = turn.scale == 1.0 ? turn.sin : turn.sin * turn.scale;
  std::vector<at::Tensor> pieces;
  if (turn.pairing == model::RopePairing::kHalfSplit) {
    const at::Tensor a = heads.slice(-1, 0, pairs);
    const at::Tensor b = heads.slice(-1, pairs, 2 * pairs);
    pieces = {a * cos - b * sin, b * cos + a * sin};
  } else {
    const at::Tensor a = heads.slice(-1, 0, 2 * pairs, 2);
    const at::Tensor b = heads.slice(-1, 1, 2 * pairs, 2);
    pieces = {
        at::stack({a * cos - b * sin, b * cos + a * sin}, -1).flatten(-2)};
  }
  if (heads.size(-1) > 2 * pairs) {
    const at::Tensor rest = heads.slice(-1, 2 * pairs);
    pieces.push_back(turn.scale == 1.0 ? rest : rest * turn.scale);
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, -1);
}

}  // namespace kvasir::compress
