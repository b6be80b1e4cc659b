// Test support: a random model, saved as a checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "base/temp_folder.h"
#include "kernels/device/dtype.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// A checkpoint folder with config.json, model.safetensors and, if there is a
// plan, kv_plan.json. The weights are those of RandomSource for the shape and
// the plan. The shape must be a Llama, whose tensors have the same names in
// files and in RandomSource.
//
// Owns: the folder, which the destructor removes.
class SavedCheckpoint {
 public:
  // If `plan` is null, the folder has no plan file, like that of a model that
  // has not been compressed.
  SavedCheckpoint(const model::ModelShape& shape, kernels::DType dtype,
                  const plan::ResolvedPlan* plan = nullptr);

  const std::string& folder() const { return folder_.path(); }
  // Copies the folder, which must have no plan, so that a test can damage the
  // copy. Returns the copy's path.
  std::string Copy(const std::string& name) const;

 private:
  const base::TempFolder folder_;
};

// Flips the lowest bit of one element of a tensor in the
// folder's model.safetensors.
void FlipNumber(const std::string& folder, const std::string& tensor,
                int64_t row, int64_t column);

}  // namespace kvasir::worker
