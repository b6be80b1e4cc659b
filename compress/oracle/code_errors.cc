#include "compress/oracle/code_errors.h"

#include <vector>

namespace kvasir::compress {

void CodeErrors::AddLatents(plan::Side side, const ProgramPart& part,
                            const at::Tensor& lost) {
  const at::Tensor all = lost.detach().square();
  std::vector<at::Tensor> heads(
      static_cast<size_t>(num_kv_heads_),
      at::zeros({lost.size(0), lost.size(1)}, all.options()));
  for (const ProgramLatent& latent : part.latents) {
    at::Tensor& sum = heads[static_cast<size_t>(latent.heads[0])];
    sum = sum +
          all.slice(-1, latent.offset, latent.offset + latent.width()).sum(-1);
  }
  Add(side, at::stack(heads, -1));
}

void CodeErrors::AddHeads(plan::Side side, const at::Tensor& lost) {
  Add(side, lost.detach().square().sum(-1));
}

void CodeErrors::Add(plan::Side side, const at::Tensor& squares) {
  at::Tensor& sum = side == plan::Side::kKey ? key_ : value_;
  sum = sum.defined() ? sum + squares : squares;
}

}  // namespace kvasir::compress
