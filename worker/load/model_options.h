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

// What a model runs on (device.h). Commands without the flags measure or write
// what is the CPU's.
struct DeviceFlags {
  std::string device = "cpu";
  bool given = false;  // --device was
  std::string module;  // empty: the one beside the program
};

// Where weights come from.
struct ModelOptions {
  std::string model;            // Hugging Face folder, names resolved
  bool random_weights = false;  // in memory, of `shape`
  std::string shape;            // "llama-3-8b"
  uint64_t weights_seed = 1;
  std::string kv_plan;            // overrides the folder's kv_plan.json
  std::string kv_dtype = "auto";  // of the full-rank plan: auto, f32, f16, bf16
  EvictionFlags eviction;         // over whatever plan it is
  int64_t page_tokens = 64;
  int threads = 0;             // 0: what the cgroup allows
  bool deterministic = false;  // RankOptions'
  DeviceFlags device;          // only of commands with AddDeviceFlags
};
void AddModelFlags(CLI::App* app, ModelOptions* options);

// The flags of AddModelFlags that `command` was given, and those that say what
// `options` has beside them, as arguments of another command.
std::vector<std::string> ModelArguments(const CLI::App& command,
                                        const ModelOptions& options);

// INVALID_ARGUMENT for a --shape, or flags of eviction, that nothing would
// read. `endpoint`: of the server that is asked in place of a model, if one is.
absl::Status CheckFlagsAreUsed(const ModelOptions& options,
                               const std::string& endpoint = "");
// One of --model and --random-weights --shape.
absl::Status CheckModelOptions(const ModelOptions& options);
// The same as a parse error (CLI::ValidationError), for a command's callback:
// wrong usage has an exit code of its own.
void RequireModel(const ModelOptions& options);

}  // namespace kvasir::cli
