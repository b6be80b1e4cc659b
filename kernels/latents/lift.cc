#include "kernels/latents/lift.h"

#include <algorithm>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/latents/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<LiftParams, DevicePtr<float>> kLift = {
    "lift", &LiftReference, &LiftSimd};
constexpr OpKernels<ComplexLiftParams> kComplexLift = {
    "complex_lift", &ComplexLiftReference, &ComplexLiftSimd};

// Checks that a head of `width` numbers, from column `begin` on, fits into a
// row of `stride` numbers.
absl::Status CheckColumns(const char* op, const char* what, int64_t begin,
                          int64_t width, int64_t stride) {
  if (begin < 0) return Refuse(op, "column", 0, begin);
  if (stride < begin + width) return Refuse(op, what, begin + width, stride);
  return absl::OkStatus();
}

absl::Status CheckHeads(const char* op, int64_t num_heads,
                        int64_t num_kv_heads) {
  if (num_kv_heads < 1) return Refuse(op, "kv_heads", 1, num_kv_heads);
  if (num_heads < 1 || num_heads % num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": the number of query heads must be a positive multiple of the ",
        "number of KV heads, ", num_kv_heads, ", but is ", num_heads));
  }
  return absl::OkStatus();
}

absl::Status CheckChannels(int64_t num_pairs,
                           absl::Span<const ComplexChannels> all) {
  for (size_t j = 0; j < all.size(); ++j) {
    const ComplexChannels& channels = all[j];
    if (channels.num_channels < 0) {
      return Refuse(kComplexLift.op, "channels", 0, channels.num_channels);
    }
    for (int64_t c = 0; c < channels.num_channels; ++c) {
      if (channels.pairs[c] >= 0 && channels.pairs[c] < num_pairs) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(kComplexLift.op, ": KV head ", j,
                       ": the pair of channel ", c, " must be from 0 to ",
                       num_pairs - 1, ", but is ", channels.pairs[c]));
    }
  }
  return absl::OkStatus();
}

// Copies the input and output columns to the device. Both lists must have one
// element per query head.
absl::Status AddColumns(const LiftColumns& columns, DeviceTables* tables,
                        DevicePtr<const int64_t>* in,
                        DevicePtr<const int64_t>* out) {
  KVASIR_ASSIGN_OR_RETURN(*in, tables->Add(columns.in));
  KVASIR_ASSIGN_OR_RETURN(*out, tables->Add(columns.out));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreparedLift> Prepare(Device& device, const LiftParams& shape,
                                     absl::Span<const PackedMatrix> matrices,
                                     const LiftColumns& columns) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kLift.op, device.kind(), shape.dtype));
  PreparedLift prepared(&device);
  LiftParams& params = prepared.params;
  params = shape;
  params.num_heads = static_cast<int64_t>(columns.in.size());
  params.num_kv_heads = static_cast<int64_t>(matrices.size());
  KVASIR_RETURN_IF_ERROR(
      CheckHeads(kLift.op, params.num_heads, params.num_kv_heads));
  const int64_t queries = params.num_heads / params.num_kv_heads;
  params.most_columns = 0;
  params.one_type = true;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const auto head = static_cast<size_t>(h);
    const PackedMatrix& matrix = matrices[static_cast<size_t>(h / queries)];
    if (matrix.k < 1) return Refuse(kLift.op, "in", 1, matrix.k);
    if (matrix.n < 1) return Refuse(kLift.op, "out", 1, matrix.n);
    if (matrix.layout != device.weight_layout()) {
      return absl::InvalidArgumentError(
          absl::StrCat(kLift.op, ": the matrix of KV head ", h / queries,
                       " has the weight layout of another kind of device; pack "
                       "it for this device"));
    }
    KVASIR_RETURN_IF_ERROR(CheckColumns(kLift.op, "x_row_stride",
                                        columns.in[head], matrix.k,
                                        params.x_row_stride));
    KVASIR_RETURN_IF_ERROR(CheckColumns(kLift.op, "y_row_stride",
                                        columns.out[head], matrix.n,
                                        params.y_row_stride));
    device.CheckMemory(kLift.op, matrix.data);
    params.most_columns = std::max(params.most_columns, matrix.n);
    if (matrix.dtype != params.dtype) params.one_type = false;
  }
  KVASIR_ASSIGN_OR_RETURN(params.matrices, prepared.tables.Add(matrices));
  KVASIR_RETURN_IF_ERROR(AddColumns(columns, &prepared.tables,
                                    &params.column_in, &params.column_out));
  return prepared;
}

absl::Status Lift(Stream& stream, const PreparedLift& prepared,
                  const LiftRows& rows, Workspace& workspace) {
  if (rows.num_rows < 0) return Refuse(kLift.op, "rows", 0, rows.num_rows);
  Workspace::Scope scope(&workspace);
  DevicePtr<float> scratch;  // only used on a CPU; a GPU uses shared memory
  if (stream.device() == DeviceKind::kCpu) {
    scratch = workspace.Take<float>(LiftScratch(ScratchThreads(stream)));
  }
  if (workspace.counting()) return CheckServed(kLift, stream);
  if (!workspace.status().ok()) return workspace.status();
  LiftParams params = prepared.params;
  params.x = rows.x;
  params.y = rows.y;
  params.first_row = rows.first_row;
  params.num_rows = rows.num_rows;
  return Launch(kLift, stream, params, scratch);
}

absl::StatusOr<PreparedComplexLift> Prepare(
    Device& device, const ComplexLiftParams& shape,
    absl::Span<const ComplexChannels> channels, const LiftColumns& columns) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kComplexLift.op, device.kind(), shape.dtype));
  PreparedComplexLift prepared(&device);
  ComplexLiftParams& params = prepared.params;
  params = shape;
  params.num_heads = static_cast<int64_t>(columns.in.size());
  params.num_kv_heads = static_cast<int64_t>(channels.size());
  KVASIR_RETURN_IF_ERROR(
      CheckHeads(kComplexLift.op, params.num_heads, params.num_kv_heads));
  if (params.num_pairs < 1) {
    return Refuse(kComplexLift.op, "pairs", 1, params.num_pairs);
  }
  KVASIR_RETURN_IF_ERROR(CheckChannels(params.num_pairs, channels));
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t h = 0; h < params.num_heads; ++h) {
    const auto head = static_cast<size_t>(h);
    KVASIR_RETURN_IF_ERROR(CheckColumns(kComplexLift.op, "x_row_stride",
                                        columns.in[head], 2 * params.num_pairs,
                                        params.x_row_stride));
    KVASIR_RETURN_IF_ERROR(CheckColumns(
        kComplexLift.op, "y_row_stride", columns.out[head],
        2 * channels[static_cast<size_t>(h / queries)].num_channels,
        params.y_row_stride));
  }
  std::vector<int32_t> pairs;
  for (const ComplexChannels& each : channels) {
    pairs.insert(pairs.end(), each.pairs, each.pairs + each.num_channels);
    device.CheckMemory(kComplexLift.op, each.up);
  }
  KVASIR_ASSIGN_OR_RETURN(DevicePtr<const int32_t> next,
                          prepared.tables.Add<int32_t>(pairs));
  std::vector<ComplexChannels> moved(channels.begin(), channels.end());
  for (ComplexChannels& each : moved) {
    each.pairs = next.device_address();
    next = next + each.num_channels;
  }
  KVASIR_ASSIGN_OR_RETURN(params.channels,
                          prepared.tables.Add<ComplexChannels>(moved));
  KVASIR_RETURN_IF_ERROR(AddColumns(columns, &prepared.tables,
                                    &params.column_in, &params.column_out));
  return prepared;
}

absl::Status ComplexLift(Stream& stream, const PreparedComplexLift& prepared,
                         const LiftRows& rows, Workspace& workspace) {
  if (rows.num_rows < 0) {
    return Refuse(kComplexLift.op, "rows", 0, rows.num_rows);
  }
  if (workspace.counting()) return CheckServed(kComplexLift, stream);
  ComplexLiftParams params = prepared.params;
  params.x = rows.x;
  params.y = rows.y;
  params.first_row = rows.first_row;
  params.num_rows = rows.num_rows;
  return Launch(kComplexLift, stream, params);
}

}  // namespace kvasir::kernels
