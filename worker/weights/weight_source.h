// Where weights come from: a checkpoint's files, or random numbers.
#pragma once

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

// Whole rows of a tensor [rows, columns] (or [rows]) as they are stored.
struct WeightBlock {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t columns = 0;  // as the source has them
  const void* data = nullptr;
};

// Tensors have our names, in every family (model/checkpoint/family_tensors.h).
// Threads: all methods from any thread.
// Errors: NOT_FOUND for an unknown name.
class WeightSource {
 public:
  using Consumer = absl::FunctionRef<absl::Status(const WeightBlock&)>;

  virtual ~WeightSource() = default;

  virtual absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const = 0;

  // Calls `consume` with the tensor's rows from front to back, in blocks that
  // fit into `buffer`; RESOURCE_EXHAUSTED when a row does not.
  virtual absl::Status Read(const std::string& name,
                            std::span<std::byte> buffer, Consumer consume) = 0;

  // Fingerprint of all tensors read so far; the weights_id after a load.
  virtual std::string WeightsId() const = 0;
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
  absl::Status Read(const std::string& name, std::span<std::byte> buffer,
                    Consumer consume) override;
  std::string WeightsId() const override;

 private:
  const model::Checkpoint* const checkpoint_;
  const std::optional<kernels::DType> missing_;
  mutable base::Mutex mutex_;
  std::map<std::string, model::Tiles> tiles_ ABSL_GUARDED_BY(mutex_);
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
  absl::Status Read(const std::string& name, std::span<std::byte> buffer,
                    Consumer consume) override;
  std::string WeightsId() const override;

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
