// The flags of a command that loads a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "plan/eviction_flags.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

// The device of a model (device.h). Commands without these flags use the CPU.
struct DeviceFlags {
  std::string device = "cpu";
  bool given = false;  // --device was given
  std::string module;  // empty: the module beside the program
};

// The model, its weights and its cache's plan.
struct ModelOptions {
  std::string model;            // Hugging Face folder, names resolved
  bool random_weights = false;  // in memory, of `shape`
  std::string shape;            // "llama-3-8b"
  uint64_t weights_seed = 1;
  std::string kv_plan;  // overrides the folder's kv_plan.json
  // type of the full-rank plan: auto, f32, f16, bf16
  std::string kv_dtype = "auto";
  EvictionFlags eviction;  // added to the plan
  int64_t page_tokens = 64;
  int threads = 0;             // 0: what the cgroup allows
  bool deterministic = false;  // RankOptions::deterministic
  DeviceFlags device;          // only for commands with AddDeviceFlags
};
void AddModelFlags(CLI::App* app, ModelOptions* options);

// Arguments that give another command the same model: the flags of
// AddModelFlags that `command` was given, and random weights and shape if
// `options` has them by default.
std::vector<std::string> ModelArguments(const CLI::App& command,
                                        const ModelOptions& options);

// INVALID_ARGUMENT for a --shape or eviction flags without effect. `endpoint`
// is the server that is called instead of running a model, if any.
absl::Status CheckFlagsAreUsed(const ModelOptions& options,
                               const std::string& endpoint = "");
// Requires either --model or --random-weights with --shape.
absl::Status CheckModelOptions(const ModelOptions& options);
// CheckModelOptions as a parse error (CLI::ValidationError), for a command's
// callback: wrong usage has its own exit code.
void RequireModel(const ModelOptions& options);

}  // namespace kvasir::cli
