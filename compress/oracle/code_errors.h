// Sums up the quantization errors of each token's key and value. Evictions may
// depend on these errors.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "compress/oracle/layer_program.h"
#include "plan/plan.h"

namespace kvasir::compress {

// Sums of squared errors for one layer. The errors are not part of the autograd
// graph.
// Threads: one caller.
class CodeErrors {
 public:
  explicit CodeErrors(int64_t num_kv_heads) : num_kv_heads_(num_kv_heads) {}

  // Adds the quantization errors `lost` of a part's latents. `lost` holds all
  // latents side by side: [B, T, sum of R'].
  void AddLatents(plan::Side side, const ProgramPart& part,
                  const at::Tensor& lost);
  // Adds the errors of keys or values that are coded as whole heads, not as
  // latents. `lost` is [B, T, Hkv, d].
  void AddHeads(plan::Side side, const at::Tensor& lost);

  // Sums of squared errors, [B, T, Hkv]. The error of a latent is added to the
  // first of the heads that share it. Undefined if nothing is coded.
  const at::Tensor& key() const { return key_; }
  const at::Tensor& value() const { return value_; }

 private:
  void Add(plan::Side side, const at::Tensor& squares);

  const int64_t num_kv_heads_;
  at::Tensor key_;
  at::Tensor value_;
};

}  // namespace kvasir::compress
