// Sums up the error of codes per token. Evictions use it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "compress/oracle/layer_program.h"
#include "plan/plan.h"

namespace kvasir::compress {

// Threads: one caller. Gradients do not pass.
class CodeErrors {
 public:
  explicit CodeErrors(int64_t num_kv_heads) : num_kv_heads_(num_kv_heads) {}

  // Adds the errors of the latents of a part, side by side [B, T, sum of R'].
  void AddLatents(plan::Side side, const ProgramPart& part,
                  const at::Tensor& lost);
  // Adds the errors of heads [B, T, Hkv, d].
  void AddHeads(plan::Side side, const at::Tensor& lost);

  // Sums of squares [B, T, Hkv]. The error of a latent counts for the first of
  // its heads. Undefined if nothing is coded.
  const at::Tensor& key() const { return key_; }
  const at::Tensor& value() const { return value_; }

 private:
  void Add(plan::Side side, const at::Tensor& squares);

  const int64_t num_kv_heads_;
  at::Tensor key_;
  at::Tensor value_;
};

}  // namespace kvasir::compress
