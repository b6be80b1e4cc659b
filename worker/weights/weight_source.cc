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

std::vector<model::RandomTensor> TensorsOf(const model::ModelShape& shape) {
  const auto spec = model::SpecOfShape(shape);
  KVASIR_CHECK(spec.ok());  // the shape is valid
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

absl::Status CheckpointSource::Read(const std::string& name,
                                    std::span<std::byte> buffer,
                                    Consumer consume) {
  KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                          checkpoint_->Tensor(name));
  model::TensorStream stream(entry, buffer);
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const model::TensorStream::Block block,
                            stream.Next());
    if (block.num_rows == 0) break;
    const int64_t numbers =
        static_cast<int64_t>(block.bytes.size()) /
        kernels::DTypeBytes(DTypeOfTensor(entry.info->type));
    KVASIR_RETURN_IF_ERROR(
        consume({block.first_row, block.num_rows, numbers / block.num_rows,
                 block.bytes.data()}));
  }
  base::MutexLock lock(&mutex_);
  tiles_[name] = stream.tiles();
  return absl::OkStatus();
}

std::string CheckpointSource::WeightsId() const {
  model::WeightsIdBuilder builder;
  base::MutexLock lock(&mutex_);
  for (const auto& [name, tiles] : tiles_) {
    builder.Add(name, *checkpoint_->tensors().Find(name)->info, tiles);
  }
  return builder.Finish(checkpoint_->spec());
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
  // A model of other tensors is another model.
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
    return absl::NotFoundError(
        absl::StrCat("shape ", shape_name_, " has no tensor ", name));
  }
  return &found->second;
}

absl::StatusOr<kernels::DType> RandomSource::TypeOf(
    const std::string& name) const {
  KVASIR_RETURN_IF_ERROR(Find(name).status());
  return dtype_;
}

absl::Status RandomSource::Read(const std::string& name,
                                std::span<std::byte> buffer, Consumer consume) {
  KVASIR_ASSIGN_OR_RETURN(const model::RandomTensor* const tensor, Find(name));
  const int64_t rows = tensor->shape[0];
  const int64_t columns = tensor->num_elements() / rows;
  const int64_t row_bytes = columns * kernels::DTypeBytes(dtype_);
  const int64_t rows_per_block =
      static_cast<int64_t>(buffer.size()) / row_bytes;
  if (rows_per_block == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tensor ", name, ": a row has ", row_bytes,
                     " bytes, the buffer ", buffer.size()));
  }
  std::vector<float> numbers;
  for (int64_t row = 0; row < rows; row += rows_per_block) {
    const int64_t count = std::min(rows_per_block, rows - row);
    numbers.resize(static_cast<size_t>(count * columns));
    model::FillRandom(*tensor, seed_, row * columns, numbers);
    std::byte* out = buffer.data();
    kernels::VisitDType(dtype_, [&](auto zero) {
      using T = decltype(zero);
      for (const float number : numbers) {
        const T stored = kernels::FromFloat<T>(number);
        std::memcpy(out, &stored, sizeof(stored));
        out += sizeof(stored);
      }
    });
    KVASIR_RETURN_IF_ERROR(consume({row, count, columns, buffer.data()}));
  }
  return absl::OkStatus();
}

std::string RandomSource::WeightsId() const {
  return absl::StrCat("random-", shape_name_, "-", kernels::DTypeName(dtype_),
                      "-", seed_);
}

}  // namespace kvasir::worker
