#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace kvasir::compress {

struct AdamWOptions {
  double weight_decay = 0.1;  // of matrices alone
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
};

// Owns: the moments. The parameters are shared with whoever computes with them.
// Threads: one caller; Step spreads its own work over `threads`.
class AdamW {
 public:
  AdamW(const std::vector<at::Tensor>& parameters, const AdamWOptions& options);

  // `gradients` in the order of the parameters.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate,
            int threads);

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor first;   // momentum
    at::Tensor second;  // mean square
  };

  AdamWOptions options_;
  std::vector<Slot> slots_;
  int64_t steps_ = 0;  // the bias correction depends on it
};

}  // namespace kvasir::compress
