#include "compress/evaluate/row_codes.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "base/status_macros.h"
#include "compress/tensors/hadamard_tensor.h"
#include "plan/normal_levels.h"

namespace kvasir::compress {
namespace {

absl::StatusOr<at::Tensor> ToFloat16(const at::Tensor& scales) {
  at::Tensor stored = scales.to(at::kHalf).to(scales.scalar_type());
  if (!at::isfinite(stored).all().item<bool>()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the scale of a row must be finite and at most 65504, the greatest "
        "number of type float16, is ",
        scales.abs().max().item<double>()));
  }
  return stored;
}

// Returns the rotation by random signs and a Hadamard matrix. The signs depend
// only on the width, so they are the same in every run.
at::Tensor RotationOf(int64_t width) {
  at::Tensor matrix = HadamardTensor(width);
  const base::PhiloxKey key = base::PhiloxKeyFromSeed(0x6b76617369722d72);
  for (int64_t i = 0; i < width; ++i) {
    const auto random = base::Philox4x32(
        key, base::PhiloxCounterOf(static_cast<uint64_t>(i), 0));
    if ((random[0] & 1) != 0) matrix.select(1, i).neg_();
  }
  return matrix;
}

}  // namespace

absl::StatusOr<at::Tensor> CodeRotated(const at::Tensor& rows, int64_t bits) {
  if (rows.numel() == 0) return rows;
  const int64_t width = rows.size(-1);
  const at::Tensor turn = RotationOf(width).to(rows.options());
  const at::Tensor turned = at::matmul(rows, turn.t());
  const at::Tensor norm = turned.norm(2, -1, /*keepdim=*/true);
  const at::Tensor levels =
      at::tensor(plan::LloydMaxLevels(bits), at::kDouble).to(rows.options());
  const at::Tensor edges =
      (levels.slice(0, 1) + levels.slice(0, 0, levels.size(0) - 1)) * 0.5;
  const at::Tensor whole = at::where(norm > 0, norm, at::ones_like(norm));
  const at::Tensor unit =
      turned / whole * std::sqrt(static_cast<double>(width));
  const at::Tensor coded =
      levels.index_select(0, at::bucketize(unit.contiguous(), edges).flatten())
          .view_as(unit);
  // The division is safe: no level is 0, so a coded row has a length above 0.
  KVASIR_ASSIGN_OR_RETURN(
      const at::Tensor scale,
      ToFloat16(norm / coded.norm(2, -1, /*keepdim=*/true)));
  return at::matmul(coded * scale, turn);
}

absl::StatusOr<at::Tensor> CodeGgml(const at::Tensor& rows, Ggml type,
                                    bool rotate) {
  if (rows.numel() == 0) return rows;
  at::Tensor turn;
  at::Tensor turned = rows;
  if (rotate) {
    turn = HadamardTensor(rows.size(-1)).to(rows.options());
    turned = at::matmul(rows, turn.t());
  }
  const at::Tensor blocks = turned.reshape({-1, kGgmlBlock});
  // The signed number that has the greatest magnitude in its block.
  const at::Tensor greatest =
      blocks.gather(1, blocks.abs().argmax(1, /*keepdim=*/true));
  const bool q8 = type == Ggml::kQ8_0;
  KVASIR_ASSIGN_OR_RETURN(
      const at::Tensor stored,
      ToFloat16(q8 ? greatest.abs() / 127.0 : greatest / -8.0));
  // ggml computes codes with the scale before it is rounded to float16.
  const at::Tensor scale = q8 ? greatest.abs() / 127.0 : greatest / -8.0;
  const at::Tensor steps =
      at::where(scale == 0, at::zeros_like(blocks), blocks / scale);
  // Like C's roundf, q8_0 rounds halves away from 0.
  const at::Tensor codes = q8 ? steps.sign() * (steps.abs() + 0.5).floor()
                              : (steps + 8.5).floor().clamp_max(15.0) - 8.0;
  const at::Tensor back = (codes * stored).view_as(turned);
  return rotate ? at::matmul(back, turn) : back;
}

at::Tensor RoundToFloat8(const at::Tensor& numbers, Float8 type) {
  const bool e4m3 = type == Float8::kE4M3;
  const int mantissa = e4m3 ? 3 : 2;
  const int least_exponent = e4m3 ? -6 : -14;
  const double greatest = e4m3 ? 448.0 : 57344.0;
  // frexp returns a number in [0.5, 1) times a power of two, so its exponent is
  // one too large here.
  const at::Tensor exponent =
      (std::get<1>(at::frexp(numbers)) - 1).clamp_min(least_exponent);
  const at::Tensor step =
      at::ldexp(at::ones_like(numbers), exponent - mantissa);
  return ((numbers / step).round() * step).clamp(-greatest, greatest);
}

}  // namespace kvasir::compress
