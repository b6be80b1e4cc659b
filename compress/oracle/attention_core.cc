#include "compress/oracle/attention_core.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace kvasir::compress {
namespace {

// Changes the order of dims from [B, T, Hkv, W] to [B * Hkv, T, W].
at::Tensor ByHead(const at::Tensor& heads) {
  return heads.permute({0, 2, 1, 3})
      .reshape({heads.size(0) * heads.size(2), heads.size(1), heads.size(3)});
}

// A block of queries [begin, end), which see only keys in [first, end).
struct Block {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first = 0;

  int64_t queries() const { return end - begin; }
  int64_t keys() const { return end - first; }
};

// Returns a mask that is added to the scores: 0 if a query sees a key,
// otherwise -infinity.
at::Tensor Mask(const Block& block, int64_t window,
                const at::TensorOptions& options) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  // The index of the first query's own key among the keys of the block.
  const int64_t own = block.begin - block.first;
  at::Tensor mask = at::full({block.queries(), block.keys()}, kHidden, options)
                        .triu_(own + 1);
  if (window > 0) {
    mask += at::full({block.queries(), block.keys()}, kHidden, options)
                .tril_(own - window);
  }
  return mask;
}

// Returns a mask of queries and keys: true for the last `tokens` keys up to the
// query's own. It is also true for later keys, which have no weight.
at::Tensor Near(const Block& block, int64_t tokens, at::Device device) {
  const at::Tensor all =
      at::ones({block.queries(), block.keys()},
               at::TensorOptions().dtype(at::kBool).device(device));
  return all.triu(block.begin - block.first - tokens + 1);
}

}  // namespace

at::Tensor WithSinks(const at::Tensor& seen, const at::Tensor& exact,
                     int64_t sinks) {
  if (sinks == 0) return seen;
  const int64_t first = std::min(sinks, seen.size(1));
  return at::cat({exact.slice(1, 0, first), seen.slice(1, first)}, 1);
}

at::Tensor SoftCap(const at::Tensor& x, double cap) {
  return cap == 0 ? x : at::tanh(x / cap) * cap;
}

at::Tensor CausalAttention(const AttentionInputs& inputs) {
  const int64_t batch = inputs.query.size(0);
  const int64_t length = inputs.query.size(1);
  const int64_t width = inputs.query.size(3);
  const int64_t kv_heads = inputs.key.size(2);
  const int64_t share = inputs.query.size(2) / kv_heads;
  const int64_t value_width = inputs.value.size(3);
  // Shape [B * Hkv, share, T, W]. The query heads that share a KV head are
  // multiplied with its keys in one product, so that keys are never copied.
  const at::Tensor query =
      inputs.query.view({batch, length, kv_heads, share, width})
          .permute({0, 2, 3, 1, 4})
          .reshape({batch * kv_heads, share, length, width});
  const at::Tensor key = ByHead(inputs.key);
  const at::Tensor value = ByHead(inputs.value);
  const bool near_keys = inputs.near_key_tokens > 0;
  const bool near_values = inputs.near_value_tokens > 0;
  const at::Tensor near_key =
      near_keys ? ByHead(inputs.near_key) : at::Tensor();
  const at::Tensor near_value =
      near_values ? ByHead(inputs.near_value) : at::Tensor();
  const at::TensorOptions options = at::TensorOptions()
                                        .dtype(inputs.query.scalar_type())
                                        .device(inputs.query.device());

  std::vector<at::Tensor> blocks;
  for (int64_t begin = 0; begin < length; begin += kQueryBlockTokens) {
    Block block{begin, std::min(begin + kQueryBlockTokens, length), 0};
    if (inputs.sliding_window > 0) {
      block.first = std::max<int64_t>(0, begin - inputs.sliding_window + 1);
    }
    const int64_t rows = share * block.queries();
    const at::Tensor block_query =
        query.slice(2, block.begin, block.end)
            .reshape({batch * kv_heads, rows, width});
    const auto seen = [&block](const at::Tensor& heads) {
      return heads.slice(1, block.first, block.end);
    };
    const std::vector<int64_t> by_query = {batch * kv_heads, share,
                                           block.queries(), block.keys()};
    at::Tensor scores =
        at::bmm(block_query, seen(key).transpose(1, 2)).view(by_query);
    if (near_keys) {
      scores = at::where(
          Near(block, inputs.near_key_tokens, options.device()),
          at::bmm(block_query, seen(near_key).transpose(1, 2)).view(by_query),
          scores);
    }
    const at::Tensor weights =
        at::softmax(SoftCap(scores, inputs.score_cap) +
                        Mask(block, inputs.sliding_window, options),
                    -1);
    const std::vector<int64_t> by_row = {batch * kv_heads, rows, block.keys()};
    at::Tensor mixed;
    if (near_values) {
      const at::Tensor near =
          Near(block, inputs.near_value_tokens, options.device());
      mixed = at::bmm((weights * near).view(by_row), seen(near_value)) +
              at::bmm((weights * near.logical_not()).view(by_row), seen(value));
    } else {
      mixed = at::bmm(weights.view(by_row), seen(value));
    }
    blocks.push_back(
        mixed.view({batch, kv_heads, share, block.queries(), value_width}));
  }
  return (blocks.size() == 1 ? blocks[0] : at::cat(blocks, 3))
      .permute({0, 3, 1, 2, 4})
      .reshape({batch, length, kv_heads * share, value_width});
}

}  // namespace kvasir::compress
