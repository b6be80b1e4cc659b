// Test support: the random model of a shape as files.
#pragma once

#include <cstdint>
#include <string>

#include "base/temp_folder.h"
#include "kernels/device/dtype.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// A folder of config.json, model.safetensors and perhaps kv_plan.json, with the
// numbers that RandomSource has for the shape (a Llama's, whose tensors have
// our names) and its plan. Owns: the folder, which goes with it.
class SavedCheckpoint {
 public:
  // `plan` null: none, of a model as it was trained.
  SavedCheckpoint(const model::ModelShape& shape, kernels::DType dtype,
                  const plan::ResolvedPlan* plan = nullptr);

  const std::string& folder() const { return folder_.path(); }
  // A copy of it, of a model without a plan, to be spoiled.
  std::string Copy(const std::string& name) const;

 private:
  const base::TempFolder folder_;
};

// Turns the lowest bit of a number of a tensor in a folder's file.
void FlipNumber(const std::string& folder, const std::string& tensor,
                int64_t row, int64_t column);

}  // namespace kvasir::worker
