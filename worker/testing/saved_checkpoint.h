// Test support: the random model of a shape, saved as files.
#pragma once

#include <cstdint>
#include <string>

#include "base/temp_folder.h"
#include "kernels/device/dtype.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// A folder with config.json, model.safetensors and perhaps kv_plan.json. The
// numbers are those of RandomSource for the shape (a Llama, whose tensors have
// our names) and the plan.
//
// Owns: the folder, which is removed with it.
class SavedCheckpoint {
 public:
  // `plan` null: no plan file, as for a model fresh from training.
  SavedCheckpoint(const model::ModelShape& shape, kernels::DType dtype,
                  const plan::ResolvedPlan* plan = nullptr);

  const std::string& folder() const { return folder_.path(); }
  // Copies a folder without a plan, for a test that damages the copy.
  std::string Copy(const std::string& name) const;

 private:
  const base::TempFolder folder_;
};

// Flips the lowest bit of one number of a tensor in a folder's file.
void FlipNumber(const std::string& folder, const std::string& tensor,
                int64_t row, int64_t column);

}  // namespace kvasir::worker
