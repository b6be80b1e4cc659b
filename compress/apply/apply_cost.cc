#include "compress/apply/apply_cost.h"

#include <algorithm>

#include "compress/apply/range_collector.h"

namespace kvasir::compress {
namespace {

// The operations per second of float64 decompositions, divided by those of
// float32 matrix products. Measured with LAPACK's gesdd and Cholesky on
// matrices of 1024 to 4096 rows.
constexpr double kDecompositionSpeed = 0.15;
constexpr double kFileBytesPerSecond = 5e8;

double Cube(double x) { return x * x * x; }

// Returns the number of floating-point operations in a singular value
// decomposition of a [rows, columns] matrix, including its singular vectors.
double SvdOperations(double rows, double columns) {
  const double less = std::min(rows, columns);
  const double more = std::max(rows, columns);
  return 8.0 * more * less * less + 10.0 * Cube(less);
}

double PartOperations(const model::DecoderSpec& spec,
                      const kvasir::v1::Part& part, int sides) {
  const double m = static_cast<double>(spec.hidden_size);
  const double d = static_cast<double>(spec.head_dim);
  double operations = 0.0;
  for (const auto& group : part.low_rank().groups()) {
    const double rows = d * sides * group.heads_size();
    operations += SvdOperations(rows, m) + 2.0 * rows * m * m;
  }
  for (const auto& group : part.rope_low_rank().groups()) {
    const double heads = group.heads_size();
    operations += 4.0 * group.pairs_size() * SvdOperations(heads, m) +
                  4.0 * heads * d * m * m;
  }
  return operations;
}

}  // namespace

ApplyCost CostOfApply(const model::Checkpoint& base,
                      const kvasir::v1::KvPlan& plan,
                      const Calibration* calibration,
                      const CalibrationSample* sample) {
  const model::DecoderSpec& spec = base.spec();
  const int64_t m = spec.hidden_size;
  const int64_t q = spec.num_heads * spec.head_dim;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  ApplyCost cost;
  constexpr int64_t kDoubleBytes = 8;
  constexpr int64_t kFloatBytes = 4;
  // Counts six matrices of the Gram matrix's size (the matrix, its root and
  // copies of both), and the projections in float32 and in float64.
  cost.layer_bytes =
      6 * m * m * kDoubleBytes +
      m * (2 * q + 2 * kv) * (2 * kFloatBytes + 2 * kDoubleBytes);
  if (calibration != nullptr) {
    cost.calibration_bytes = spec.num_layers() * m * m * kDoubleBytes;
  }
  for (const kvasir::v1::LayerPlan& layer : plan.layers()) {
    double operations = 0.0;
    for (const auto* side : {&layer.key(), &layer.value()}) {
      for (const kvasir::v1::Part& part : side->parts()) {
        operations += PartOperations(spec, part, /*sides=*/1);
      }
    }
    for (const kvasir::v1::Part& part : layer.joint()) {
      operations += PartOperations(spec, part, /*sides=*/2);
    }
    if (operations > 0.0) {
      operations += Cube(static_cast<double>(m)) / 3.0;
    }
    cost.factor_operations += operations;
  }
  if (RangeCollector::IsNeeded(plan) && sample != nullptr) {
    const int64_t tokens = RangeCollector::SequencesFor(plan, *sample, {}) *
                           sample->sequence_tokens;
    cost.hidden_bytes = tokens * m * kFloatBytes;
    const double weights = static_cast<double>(
        m * (2 * (2 * q + 2 * kv) +
             model::MlpMatrices(spec.mlp) * spec.used_mlp_features()));
    cost.range_operations = 2.0 * static_cast<double>(tokens) *
                            static_cast<double>(spec.num_layers()) * weights;
  }
  for (const auto& [name, entry] : base.tensors().entries()) {
    cost.copied_bytes += static_cast<int64_t>(entry.info->size_bytes);
  }
  return cost;
}

absl::Duration TimeOfApply(const ApplyCost& cost,
                           double operations_per_second) {
  const double decompositions =
      cost.factor_operations / (kDecompositionSpeed * operations_per_second);
  const double ranges = 1.35 * cost.range_operations / operations_per_second;
  const double files =
      static_cast<double>(cost.copied_bytes) / kFileBytesPerSecond;
  return absl::Seconds(decompositions + ranges + files);
}

}  // namespace kvasir::compress
