// The command-line flags of commands that load a model.
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

// The flags for the device of a model (device.h). Commands without these flags
// use the CPU.
struct DeviceFlags {
  std::string device = "cpu";
  bool given = false;
  std::string module;  // empty: kvasir-emulated.so in the program's folder
};

// The value of --kv-plan with which a server measures plans and chooses one.
inline constexpr char kAutoPlan[] = "auto";

// The flags that choose a model, its weights, its cache's plan and its device.
struct ModelOptions {
  std::string model;  // folder of a Hugging Face checkpoint, or a GGUF file
  bool random_weights = false;  // use random weights in a model of `shape`
  std::string shape;            // for example "llama-3-8b"
  // Removes the biases of queries, keys and values from a shape of the Qwen2
  // family. For benchmarks.
  bool without_bias = false;
  uint64_t weights_seed = 1;
  std::string kv_plan;  // overrides the folder's kv_plan.json
  // Data type of the cache if there is no plan: auto, f32, f16 or bf16.
  std::string kv_dtype = "auto";
  EvictionFlags eviction;  // adds evictions to the plan
  int64_t page_tokens = 64;
  int threads = 0;             // 0: as many as the cgroup allows
  bool deterministic = false;  // see RankOptions::deterministic
  bool no_key_means = false;   // leaves RankOptions::key_mean_tokens empty
  DeviceFlags device;          // only in commands that call AddDeviceFlags
};
void AddModelFlags(CLI::App* app, ModelOptions* options);

// Returns arguments with which another command loads the same model. They are
// the flags of AddModelFlags that were given to `command`, and --random-weights
// and --shape if `options` sets them by default.
std::vector<std::string> ModelArguments(const CLI::App& command,
                                        const ModelOptions& options);

// INVALID_ARGUMENT if --shape or eviction flags were given but have no effect.
// `endpoint` is the server that the command calls instead of running a model,
// if any.
absl::Status CheckFlagsAreUsed(const ModelOptions& options,
                               const std::string& endpoint = "");
// INVALID_ARGUMENT unless the flags name a model: either --model, or
// --random-weights with --shape.
absl::Status CheckModelOptions(const ModelOptions& options);
// Throws the error of CheckModelOptions as a parse error
// (CLI::ValidationError), so that the program ends with the exit code for wrong
// usage. Commands call it in their callbacks.
void RequireModel(const ModelOptions& options);

}  // namespace kvasir::cli
