// Where weights come from: a checkpoint's files, or random numbers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "kernels/device/dtype.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/random_weights.h"
#include "model/shapes/shapes.h"

namespace kvasir::worker {

// Of a tensor [rows, columns], or [rows] of one column.
struct MatrixSize {
  int64_t rows = 0;
  int64_t columns = 0;
};

// A part of it. It begins at a tile's corner and ends at one, or with the
// tensor (model/checkpoint/fingerprint.h).
struct ReadRange {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;

  static ReadRange All(const MatrixSize& size) {
    return {0, size.rows, 0, size.columns};
  }
};

// Rows of the range that is read, as they are stored.
struct WeightBlock {
  int64_t first_row = 0;  // of the tensor
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;  // of the range
  const void* data = nullptr;
};

// Tensors have our names, in every family (model/checkpoint/family_tensors.h).
// Threads: all methods from any thread.
// Errors: NOT_FOUND for an unknown name, INVALID_ARGUMENT for a range that the
// tensor does not have or that is not of whole tiles.
class WeightSource {
 public:
  using Consumer = absl::FunctionRef<absl::Status(const WeightBlock&)>;

  virtual ~WeightSource() = default;

  virtual absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const = 0;
  virtual absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const = 0;

  // Calls `consume` with the rows of a range from front to back, in blocks that
  // fit into `buffer`; RESOURCE_EXHAUSTED when a row does not. No other byte is
  // read; a range of no rows only says that the tensor is one of the weights'.
  virtual absl::Status Read(const std::string& name, const ReadRange& range,
                            std::span<std::byte> buffer, Consumer consume) = 0;

  // What was read so far, as model::CombineWeightTiles takes it.
  virtual std::string WeightTiles() const = 0;
};

// `checkpoint` must outlive it. To count weights under a plan that is still to
// be applied, tensors that are missing have the type `missing`; nothing of them
// is read.
class CheckpointSource final : public WeightSource {
 public:
  explicit CheckpointSource(
      const model::Checkpoint* checkpoint,
      std::optional<kernels::DType> missing = std::nullopt)
      : checkpoint_(checkpoint), missing_(missing) {}

  absl::StatusOr<kernels::DType> TypeOf(const std::string& name) const override;
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override;
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override;
  std::string WeightTiles() const override;

  // Asked of the files so far.
  int64_t read_bytes() const {
    return read_bytes_.load(std::memory_order_relaxed);
  }

 private:
  // Of a range: what was read of it last.
  struct RangeTiles {
    int64_t first_row = 0;  // in tiles
    int64_t first_column = 0;
    model::Tiles tiles;
  };

  const model::Checkpoint* const checkpoint_;
  const std::optional<kernels::DType> missing_;
  std::atomic<int64_t> read_bytes_{0};
  mutable base::Mutex mutex_;
  std::map<std::string, std::vector<RangeTiles>> tiles_ ABSL_GUARDED_BY(mutex_);
};

// The random model of a shape, or of a plan for it: the same numbers for the
// same seed, everywhere.
class RandomSource final : public WeightSource {
 public:
  // `shape` is valid (model::SpecOfShape).
  RandomSource(const model::ModelShape& shape, uint64_t seed,
               kernels::DType dtype);
  // model::RandomTensorsOf's errors.
  static absl::StatusOr<std::unique_ptr<RandomSource>> Create(
      const model::ModelShape& shape, const model::DecoderSpec& spec,
      const plan::ResolvedPlan& plan, uint64_t seed, kernels::DType dtype);

  absl::StatusOr<kernels::DType> TypeOf(const std::string& name) const override;
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override;
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override;
  std::string WeightTiles() const override;

 private:
  RandomSource(std::string name, std::vector<model::RandomTensor> tensors,
               uint64_t seed, kernels::DType dtype);
  absl::StatusOr<const model::RandomTensor*> Find(
      const std::string& name) const;

  const std::string shape_name_;
  const uint64_t seed_;
  const kernels::DType dtype_;
  std::map<std::string, model::RandomTensor> tensors_;
};

}  // namespace kvasir::worker
