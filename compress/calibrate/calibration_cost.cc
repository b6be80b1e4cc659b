#include "compress/calibrate/calibration_cost.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "compress/calibrate/head_loss.h"
#include "compress/oracle/attention_core.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/for_each_index.h"

namespace kvasir::compress {
namespace {

constexpr int64_t kFloatBytes = 4;

// The factor by which the time exceeds that of the matrix products, because of
// norms, activations and threads that wait for one another. It is an estimate
// and not fitted to any machine.
constexpr double kOverhead = 1.35;
// A float64 product takes twice as long as a float32 product.
constexpr double kDoubleCost = 2.0;

// Returns the number of weights in a layer's matrix products, for an MLP of
// `features` features.
double LayerWeights(const model::DecoderSpec& spec, int64_t features) {
  const double m = static_cast<double>(spec.hidden_size);
  const double q = static_cast<double>(spec.num_heads * spec.head_dim);
  const double kv = static_cast<double>(spec.num_kv_heads * spec.head_dim);
  const double f = static_cast<double>(features);
  const auto matrices = static_cast<double>(model::MlpMatrices(spec.mlp));
  return m * (2 * q + 2 * kv + matrices * f);
}

// Returns how many numbers a layer's intermediate results have for one
// sequence, without attention scores.
int64_t RowNumbers(const model::DecoderSpec& spec, int64_t tokens) {
  const int64_t q = spec.num_heads * spec.head_dim;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  return tokens *
         (8 * spec.hidden_size + 4 * q + 4 * kv + 5 * spec.used_mlp_features());
}

// Returns how many numbers of a layer's intermediate results are kept for the
// backward pass of one sequence.
int64_t SavedNumbers(const model::DecoderSpec& spec, int64_t tokens) {
  // For each block of queries: the scores with all keys up to the end of the
  // block, and their softmax.
  int64_t scores = 0;
  for (int64_t begin = 0; begin < tokens; begin += kQueryBlockTokens) {
    const int64_t end = std::min(begin + kQueryBlockTokens, tokens);
    scores += 2 * spec.num_heads * (end - begin) * end;
  }
  return RowNumbers(spec, tokens) + scores;
}

int64_t StoredBytes(const model::Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const auto& [name, entry] : checkpoint.tensors().entries()) {
    bytes += static_cast<int64_t>(entry.info->size_bytes);
  }
  return bytes;
}

}  // namespace

CalibrationCost CostOfCalibration(const model::Checkpoint& checkpoint,
                                  const CalibrationSample& sample,
                                  const CalibrateOptions& options) {
  const model::DecoderSpec& spec = checkpoint.spec();
  const CalibrationParts& parts = options.parts;
  const int64_t labels = parts.information ? parts.labels_per_position : 0;
  const int64_t ways_back = (parts.fisher ? 1 : 0) + labels;
  const int64_t tokens = sample.sequence_tokens;
  const int64_t batch =
      std::min(options.sequences_at_a_time(), sample.num_sequences());
  const auto layer_bytes =
      static_cast<int64_t>(LayerWeights(spec, spec.mlp_features())) *
      kFloatBytes;
  const int64_t hidden_bytes = tokens * spec.hidden_size * kFloatBytes;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  const int64_t kv_bytes = 2 * kv * spec.hidden_size * kFloatBytes;

  CalibrationCost cost;
  cost.sum_bytes = SumBytes(spec, sample, parts);
  if (parts.has_gradients()) {
    cost.model_bytes = StoredBytes(checkpoint);
    // The backward pass has a gradient for every saved number, but only about
    // half of the gradients exist at the same time, hence 3 / 2.
    const int64_t layer =
        layer_bytes +
        batch * (SavedNumbers(spec, tokens) * kFloatBytes * 3 / 2 +
                 (parts.fisher ? kv_bytes : 0) +
                 // With labels: the float64 gradients of keys or values, and
                 // their products.
                 (labels > 0 ? 8 * (2 * tokens * kv + 4 * kv * kv) : 0));
    // The output head is finished before the layers' backward passes begin.
    // Each thread works on one sequence.
    const int64_t head =
        std::min<int64_t>(batch, options.threads) *
        (HeadLossBytes(tokens, spec.vocab_size, spec.hidden_size, labels) +
         3 * hidden_bytes);
    // Freed memory that the threads' malloc arenas do not return. In
    // measurements with 512 and 1024 tokens per sequence, it was about as large
    // as a layer's intermediate results.
    const int64_t arenas =
        batch * RowNumbers(spec, tokens) * kFloatBytes * 3 / 2;
    cost.workspace_bytes = std::max(layer, head) + arenas;
    cost.micro_batch_bytes =
        batch * (spec.num_layers() + std::max<int64_t>(ways_back, 1)) *
        hidden_bytes;
  } else {
    cost.model_bytes = layer_bytes;
    cost.workspace_bytes =
        batch * SavedNumbers(spec, std::min(tokens, kQueryBlockTokens)) *
        kFloatBytes * tokens / std::min(tokens, kQueryBlockTokens);
    cost.micro_batch_bytes = sample.num_sequences() * hidden_bytes;
  }

  const auto total = static_cast<double>(sample.num_tokens());
  const double attention =
      2.0 * static_cast<double>(tokens * spec.num_heads * spec.head_dim);
  const double layers = static_cast<double>(spec.num_layers());
  cost.forward_operations =
      total * layers *
      (2.0 * LayerWeights(spec, spec.used_mlp_features()) + attention);
  if (parts.has_gradients()) {
    const double counted = total *
                           static_cast<double>(sample.counted_sequences()) /
                           static_cast<double>(sample.num_sequences());
    const auto ways = static_cast<double>(ways_back);
    // The backward phase computes each layer forward once more and then
    // backward. It also computes the head forward and backward.
    const double m = static_cast<double>(spec.hidden_size);
    const double heads =
        (parts.fisher ? 1.0 : 0.0) + (parts.information ? 1.0 : 0.0);
    cost.back_operations =
        counted * layers *
            (2.0 * LayerWeights(spec, spec.used_mlp_features()) + attention) *
            (1.0 + ways) +
        counted * layers *
            (attention * ways +
             (parts.fisher ? static_cast<double>(kv_bytes) / 2.0 : 0.0)) +
        counted * heads * 4.0 * static_cast<double>(spec.vocab_size) * m;
  }
  // Only the blocks on and above the diagonal are computed, so there are about
  // 1.25 instead of 2 operations per entry and token.
  const double m = static_cast<double>(spec.hidden_size);
  cost.gram_operations = total * layers * m * m * 1.25;
  if (parts.information) {
    cost.gram_operations += total * layers * 4.0 *
                            static_cast<double>(kv * kv) *
                            static_cast<double>(labels);
  }
  return cost;
}

double MeasureOperationsPerSecond(int threads, at::Device device) {
  constexpr int64_t kRows = 512;
  constexpr int64_t kDepth = 1024;
  const at::NoGradGuard no_grad;
  const ScopedBlasThreads blas_threads(1);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const at::Tensor left = at::ones({kRows, kDepth}, options);
  const at::Tensor right = at::ones({kDepth, kDepth}, options);
  double best = 0.0;
  // The first of the rounds warms up; the fastest round counts.
  for (int round = 0; round < 4; ++round) {
    const absl::Time start = absl::Now();
    ForEachIndex(threads, threads, [&](int64_t) {
      const at::NoGradGuard no_grad_here;
      const at::Tensor product = at::mm(left, right);
      // Copying one number to the CPU waits until the GPU has finished the
      // product.
      if (!device.is_cpu()) product[0][0].item<float>();
    });
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    const double operations = 2.0 * static_cast<double>(kRows * kDepth) *
                              static_cast<double>(kDepth * threads);
    best = std::max(best, operations / std::max(seconds, 1e-6));
  }
  return best;
}

CalibrationTime TimeOfCalibration(const CalibrationCost& cost,
                                  double operations_per_second) {
  auto seconds = [&](double operations) {
    return absl::Seconds(kOverhead * operations / operations_per_second);
  };
  CalibrationTime time;
  time.way_back = seconds(cost.back_operations);
  time.total = time.way_back + seconds(cost.forward_operations +
                                       kDoubleCost * cost.gram_operations);
  return time;
}

}  // namespace kvasir::compress
