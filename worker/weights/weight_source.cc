#include "worker/weights/weight_source.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "model/checkpoint/weight_tiles.h"
#include "model/shapes/shape_config.h"

namespace kvasir::worker {
namespace {

kernels::DType DTypeOfTensor(model::TensorType type) {
  switch (type) {
    case model::TensorType::kF16:
      return kernels::DType::kF16;
    case model::TensorType::kBF16:
      return kernels::DType::kBf16;
    default:
      return kernels::DType::kF32;
  }
}

MatrixSize SizeOfTensor(const model::TensorInfo& info) {
  return {info.num_rows(), static_cast<int64_t>(info.row_bytes()) /
                               kernels::DTypeBytes(DTypeOfTensor(info.type))};
}

// Checks the rows or the columns of a range. The tensor has `all` of them, and
// a tile has `tile`. `what` is "row" or "column".
absl::Status CheckPart(const char* what, int64_t first, int64_t count,
                       int64_t all, int64_t tile) {
  const auto refuse = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot read ", count, " ", what, "s from ", what, " ",
                     first, " on: ", why..., " ", what, "s"));
  };
  if (first < 0 || count < 0 || first > all || count > all - first) {
    return refuse("they are not inside the tensor, which has ", all);
  }
  const int64_t end = first + count;
  if (first % tile != 0 || (end != all && end % tile != 0)) {
    return refuse("they are not whole tiles of ", tile);
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const ReadRange& range, const MatrixSize& size,
                        int64_t width) {
  KVASIR_RETURN_IF_ERROR(CheckPart("row", range.first_row, range.num_rows,
                                   size.rows, model::kTileRows));
  return CheckPart("column", range.first_column, range.num_columns,
                   size.columns, model::kTileRowBytes / width);
}

MatrixSize SizeOfRandom(const model::RandomTensor& tensor) {
  const int64_t rows = tensor.shape[0];
  return {rows, rows == 0 ? 0 : tensor.num_elements() / rows};
}

std::vector<model::RandomTensor> TensorsOf(const model::ModelShape& shape) {
  const auto spec = model::SpecOfShape(shape);
  KVASIR_CHECK(spec.ok());  // guaranteed by the caller
  return model::RandomTensorsOf(shape, *spec);
}

}  // namespace

absl::StatusOr<kernels::DType> CheckpointSource::TypeOf(
    const std::string& name) const {
  const auto entry = checkpoint_->Tensor(name);
  if (absl::IsNotFound(entry.status()) && missing_.has_value()) {
    return *missing_;
  }
  KVASIR_RETURN_IF_ERROR(entry.status());
  return DTypeOfTensor(entry->info->type);
}

absl::StatusOr<MatrixSize> CheckpointSource::SizeOf(
    const std::string& name) const {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint_->Tensor(name));
  return SizeOfTensor(*entry.info);
}

absl::Status CheckpointSource::Read(const std::string& name,
                                    const ReadRange& range,
                                    std::span<std::byte> buffer,
                                    Consumer consume) {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint_->Tensor(name));
  const int64_t width = kernels::DTypeBytes(DTypeOfTensor(entry.info->type));
  KVASIR_RETURN_IF_ERROR(CheckRange(range, SizeOfTensor(*entry.info), width));
  model::TensorStream stream(entry,
                             {.first_row = range.first_row,
                              .num_rows = range.num_rows,
                              .first_byte = range.first_column * width,
                              .row_bytes = range.num_columns * width},
                             buffer);
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const model::TensorStream::Block block,
                            stream.Next());
    if (block.num_rows == 0) break;
    KVASIR_RETURN_IF_ERROR(
        consume({block.first_row, block.num_rows, range.first_column,
                 range.num_columns, block.bytes.data()}));
  }
  read_bytes_.fetch_add(stream.read_bytes(), std::memory_order_relaxed);
  RangeTiles own = {range.first_row / model::kTileRows,
                    range.first_column * width / model::kTileRowBytes,
                    stream.tiles()};
  base::MutexLock lock(&mutex_);
  std::vector<RangeTiles>& all = tiles_[name];
  if (range.num_rows == 0) return absl::OkStatus();
  const auto same = std::find_if(all.begin(), all.end(), [&](const auto& one) {
    return one.first_row == own.first_row &&
           one.first_column == own.first_column;
  });
  if (same != all.end()) {
    *same = std::move(own);
  } else {
    all.push_back(std::move(own));
  }
  return absl::OkStatus();
}

std::string CheckpointSource::WeightTiles() const {
  model::WeightsIdBuilder builder;
  base::MutexLock lock(&mutex_);
  for (const auto& [name, ranges] : tiles_) {
    const model::TensorInfo& info = *checkpoint_->tensors().Find(name)->info;
    builder.AddTensor(name, info);
    for (const RangeTiles& range : ranges) {
      builder.Add(name, info, range.tiles, range.first_row, range.first_column);
    }
  }
  return model::WeightTilesText(builder.tensors(), checkpoint_->spec());
}

RandomSource::RandomSource(std::string name,
                           std::vector<model::RandomTensor> tensors,
                           uint64_t seed, kernels::DType dtype)
    : shape_name_(std::move(name)), seed_(seed), dtype_(dtype) {
  for (model::RandomTensor& tensor : tensors) {
    std::string tensor_name = tensor.name;
    tensors_.emplace(std::move(tensor_name), std::move(tensor));
  }
}

RandomSource::RandomSource(const model::ModelShape& shape, uint64_t seed,
                           kernels::DType dtype)
    : RandomSource(shape.name, TensorsOf(shape), seed, dtype) {}

absl::StatusOr<std::unique_ptr<RandomSource>> RandomSource::Create(
    const model::ModelShape& shape, const model::DecoderSpec& spec,
    const plan::ResolvedPlan& plan, uint64_t seed, kernels::DType dtype) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<model::RandomTensor> tensors,
                          model::RandomTensorsOf(shape, spec, plan));
  // If the plan changes the tensors, the model gets another name, so that
  // WeightTiles distinguishes its weights from those without the plan.
  const auto lines = [](const std::vector<model::RandomTensor>& list) {
    std::set<std::string> all;
    for (const model::RandomTensor& tensor : list) {
      all.insert(absl::StrCat(tensor.name, " ",
                              absl::StrJoin(tensor.shape, ","), " ",
                              tensor.value));
    }
    return all;
  };
  const std::set<std::string> own = lines(tensors);
  std::string name = shape.name;
  if (own != lines(model::RandomTensorsOf(shape, spec))) {
    absl::StrAppend(
        &name, "-",
        absl::Hex(model::HashName(absl::StrJoin(own, "\n")), absl::kZeroPad16));
  }
  return std::unique_ptr<RandomSource>(
      new RandomSource(std::move(name), std::move(tensors), seed, dtype));
}

absl::StatusOr<const model::RandomTensor*> RandomSource::Find(
    const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat("the model shape ", shape_name_,
                                            " has no tensor named ", name));
  }
  return &found->second;
}

absl::StatusOr<kernels::DType> RandomSource::TypeOf(
    const std::string& name) const {
  KVASIR_RETURN_IF_ERROR(Find(name).status());
  return dtype_;
}

absl::StatusOr<MatrixSize> RandomSource::SizeOf(const std::string& name) const {
  KVASIR_ASSIGN_OR_RETURN(const model::RandomTensor* const tensor, Find(name));
  return SizeOfRandom(*tensor);
}

absl::Status RandomSource::Read(const std::string& name, const ReadRange& range,
                                std::span<std::byte> buffer, Consumer consume) {
  KVASIR_ASSIGN_OR_RETURN(const model::RandomTensor* const tensor, Find(name));
  const MatrixSize size = SizeOfRandom(*tensor);
  const int64_t width = kernels::DTypeBytes(dtype_);
  KVASIR_RETURN_IF_ERROR(CheckRange(range, size, width));
  const int64_t row_bytes = range.num_columns * width;
  if (range.num_rows == 0 || row_bytes == 0) return absl::OkStatus();
  const int64_t rows_per_block =
      static_cast<int64_t>(buffer.size()) / row_bytes;
  if (rows_per_block == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tensor ", name, ": a row has ", row_bytes,
                     " bytes, but the buffer has only ", buffer.size()));
  }
  const bool whole_rows = range.num_columns == size.columns;
  std::vector<float> numbers;
  const int64_t end = range.first_row + range.num_rows;
  for (int64_t row = range.first_row; row < end; row += rows_per_block) {
    const int64_t count = std::min(rows_per_block, end - row);
    numbers.resize(static_cast<size_t>(count * range.num_columns));
    const std::span<float> all(numbers);
    if (whole_rows) {
      model::FillRandom(*tensor, seed_, row * size.columns, all);
    }
    for (int64_t i = 0; !whole_rows && i < count; ++i) {
      model::FillRandom(*tensor, seed_,
                        (row + i) * size.columns + range.first_column,
                        all.subspan(static_cast<size_t>(i * range.num_columns),
                                    static_cast<size_t>(range.num_columns)));
    }
    std::byte* out = buffer.data();
    kernels::VisitDType(dtype_, [&](auto zero) {
      using T = decltype(zero);
      for (const float number : numbers) {
        const T stored = kernels::FromFloat<T>(number);
        std::memcpy(out, &stored, sizeof(stored));
        out += sizeof(stored);
      }
    });
    KVASIR_RETURN_IF_ERROR(consume(
        {row, count, range.first_column, range.num_columns, buffer.data()}));
  }
  return absl::OkStatus();
}

std::string RandomSource::WeightTiles() const {
  return model::WeightTilesText(absl::StrCat(
      "random-", shape_name_, "-", kernels::DTypeName(dtype_), "-", seed_));
}

}  // namespace kvasir::worker
