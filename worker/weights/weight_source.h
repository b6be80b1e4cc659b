// Sources of weights: a checkpoint's files, or random numbers.
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

// The size of a tensor [rows, columns]; a tensor [rows] has one column.
struct MatrixSize {
  int64_t rows = 0;
  int64_t columns = 0;
};

// A part of a tensor that consists of whole tiles
// (model/checkpoint/fingerprint.h).
struct ReadRange {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;

  static ReadRange All(const MatrixSize& size) {
    return {0, size.rows, 0, size.columns};
  }
};

// Some rows of a range, in the stored type.
struct WeightBlock {
  int64_t first_row = 0;  // counted from the tensor's first row
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;  // the number of columns of the range
  const void* data = nullptr;
};

// Provides tensors by name. Every model family uses the names of Llama's
// tensors (model/checkpoint/family_tensors.h).
//
// Threads: all methods from any thread.
// Errors: NOT_FOUND for an unknown name. INVALID_ARGUMENT for a range outside
//   the tensor or not of whole tiles.
class WeightSource {
 public:
  using Consumer = absl::FunctionRef<absl::Status(const WeightBlock&)>;

  virtual ~WeightSource() = default;

  virtual absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const = 0;
  virtual absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const = 0;

  // Calls `consume` with the rows of a range, from front to back, in blocks
  // that fit into `buffer`. Reads nothing outside the range. RESOURCE_EXHAUSTED
  // if a row does not fit into `buffer`. A range without rows only records that
  // the tensor belongs to the weights.
  virtual absl::Status Read(const std::string& name, const ReadRange& range,
                            std::span<std::byte> buffer, Consumer consume) = 0;

  // The hashes of the tiles that have been read so far, in the form that
  // model::CombineWeightTiles takes.
  virtual std::string WeightTiles() const = 0;
};

// Reads weights from a checkpoint, which must outlive the source. For tensors
// that the checkpoint lacks, TypeOf returns `missing`, so that their bytes can
// be counted. Such tensors cannot be read.
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

  // Bytes requested from the files so far.
  int64_t read_bytes() const {
    return read_bytes_.load(std::memory_order_relaxed);
  }

 private:
  // The hashes of the tiles in one range, computed when the range was
  // last read.
  struct RangeTiles {
    int64_t first_row = 0;  // in tiles, not in rows
    int64_t first_column = 0;
    model::Tiles tiles;
  };

  const model::Checkpoint* const checkpoint_;
  const std::optional<kernels::DType> missing_;
  std::atomic<int64_t> read_bytes_{0};
  mutable base::Mutex mutex_;
  std::map<std::string, std::vector<RangeTiles>> tiles_ ABSL_GUARDED_BY(mutex_);
};

// Makes the weights of a random model with this shape, and with the tensors of
// a plan if one is given. The same seed gives the same numbers on every
// machine.
class RandomSource final : public WeightSource {
 public:
  // `shape` must be valid (model::SpecOfShape).
  RandomSource(const model::ModelShape& shape, uint64_t seed,
               kernels::DType dtype);
  // Returns the errors of model::RandomTensorsOf.
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
