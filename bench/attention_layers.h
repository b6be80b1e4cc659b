// The attention of one layer over many arenas: the ops that the engine runs for
// a layer (projections, rotation, append, attention, lifts, output), with
// random weights and a cache full of random latents.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "bench/step_timer.h"
#include "cache/layout/layout.h"
#include "kernels/device/activations.h"
#include "kernels/device/device.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/stream.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "worker/executor/attention/layer_attention.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/program/prompt_lift.h"
#include "worker/weights/weights.h"

namespace kvasir::bench {

// The sequences of one launch. Each has `context` slots in the end; the launch
// writes the last `new_tokens` of them.
struct LaunchShape {
  int64_t batch = 1;
  int64_t context = 0;
  int64_t new_tokens = 1;

  int64_t tokens() const { return batch * new_tokens; }
  int64_t slots() const { return batch * context; }
  friend bool operator==(const LaunchShape&, const LaunchShape&) = default;
};

struct LaunchTime {
  double layer_seconds = 0.0;      // all of the layer's attention
  double attention_seconds = 0.0;  // over the cache, including lifts
  double kernel_seconds = 0.0;     // only paged_attention
};

// Owns: the weights of one layer (or shares them), arenas of `num_arenas`
// layers,
//   and their tables. Pages of a sequence lie in random order.
class AttentionLayers {
 public:
  struct Options {
    model::ModelShape shape;  // only its attention is used
    std::string plan;         // a preset's name
    int64_t page_tokens = 64;
    // Slots of an arena, enough for all sequences of a launch.
    int64_t slots = 0;
    int64_t num_arenas = 1;
    bool lift_prompts = false;  // as in worker::ServeOptions
    uint64_t seed = 1;
    // Weights of another object with the same shape, plan, lifts, seed and
    // device, because they take long to make. Null: makes its own.
    std::shared_ptr<const worker::ModelWeights> weights;
    // The device, which outlives this object. Null: the CPU, with the pool's
    // threads.
    kernels::Device* device = nullptr;
    // Measures time on the device; outlives this object. Null: the CPU's clock.
    StepTimer* timer = nullptr;
  };

  // The plan is a preset's name, or dense-4bit: whole keys and values in codes
  // of 4 bits. `pool` outlives the object. Returns errors of the plan, the
  // weights and the allocator.
  static absl::StatusOr<std::unique_ptr<AttentionLayers>> Create(
      const Options& options, base::ThreadPool* pool);

  // One launch over the next arena. The first launch of a shape also counts its
  // workspace.
  absl::StatusOr<LaunchTime> Run(const LaunchShape& launch);

  const model::DecoderSpec& spec() const { return spec_; }
  const plan::ResolvedPlan& plan() const { return *plan_; }
  const cache::PageLayout& layout() const { return *layout_; }
  // True if some latents of prompts are lifted.
  bool lifts_prompts() const {
    return worker::LiftsPrompts(*weights_->layers.front().attention);
  }
  std::shared_ptr<const worker::ModelWeights> weights() const {
    return weights_;
  }
  // Only for a GPU.
  const kernels::AttentionKernels& kernels() const {
    return attention_.front().kernels();
  }
  int64_t num_arenas() const { return static_cast<int64_t>(attention_.size()); }
  // Payload of a slot in one layer's page.
  double bytes_per_slot() const;

  // bytes_per_slot() without making anything, to choose num_arenas.
  static absl::StatusOr<double> BytesPerSlot(const model::ModelShape& shape,
                                             const std::string& plan,
                                             int64_t page_tokens);

 private:
  absl::Status LoadWeights(const Options& options);
  absl::Status MakeArenas(const Options& options);
  absl::Status MakeLayers(int64_t max_tokens);
  absl::Status Prepare(const LaunchShape& launch);
  absl::Status Launch(kernels::Workspace& workspace);

  AttentionLayers(const Options& options, base::ThreadPool* pool);
  absl::Status DivideSteps();
  // Allocates device memory and fills it with these numbers.
  template <typename T>
  absl::Status Put(const std::vector<T>& host, kernels::DeviceBuffer* buffer);

  base::ThreadPool* const pool_;
  kernels::CpuDevice cpu_;
  CpuStepTimer cpu_timer_;
  kernels::Device& device_;
  StepTimer& timer_;
  const kernels::Activations activations_;
  std::unique_ptr<kernels::Stream> stream_;
  model::DecoderSpec spec_;  // one layer for each arena
  std::shared_ptr<const plan::ResolvedPlan> plan_;
  std::unique_ptr<cache::PageLayout> layout_;
  std::shared_ptr<const worker::ModelWeights> weights_;  // of one layer
  std::unique_ptr<worker::KvArenas> arenas_;
  std::vector<uint64_t> rope_steps_;
  kernels::DeviceTables tables_{&device_};
  kernels::HadamardTables hadamard_{&device_};
  kernels::DeviceBuffer fresh_;
  std::vector<worker::LayerAttention> attention_;  // by arena

  // The last launch.
  LaunchShape launch_;
  std::vector<int32_t> block_tables_;  // all pages of an arena, shuffled
  std::vector<kernels::AttentionSequence> sequences_;
  std::vector<worker::SequenceRows> rows_;
  std::vector<kernels::AttentionStep> steps_;
  // In the device's memory.
  kernels::DeviceBuffer tables_on_device_;
  kernels::DeviceBuffer sequences_on_device_;
  kernels::DeviceBuffer slots_;
  kernels::DeviceBuffer positions_;
  kernels::DeviceBuffer normed_;
  kernels::DeviceBuffer out_;
  kernels::DeviceBuffer workspace_;
  size_t next_arena_ = 0;
};

}  // namespace kvasir::bench
