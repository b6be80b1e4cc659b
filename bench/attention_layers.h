// Benchmarks the attention of one layer. It runs the same ops as the engine,
// with random weights and a cache full of random data. Each launch uses another
// copy of the layer's cache (an arena), so that CPU or GPU caches do not help.
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

// The sequences of one launch: `batch` sequences with `new_tokens` tokens each.
// After the launch has written these tokens, each sequence has `context` tokens
// in the cache.
struct LaunchShape {
  int64_t batch = 1;
  int64_t context = 0;
  int64_t new_tokens = 1;

  int64_t tokens() const { return batch * new_tokens; }
  int64_t slots() const { return batch * context; }
  friend bool operator==(const LaunchShape&, const LaunchShape&) = default;
};

struct LaunchTime {
  double layer_seconds = 0.0;  // all attention ops of the layer
  // attention over the cache, including the lifts of latents to whole heads
  double attention_seconds = 0.0;
  double kernel_seconds = 0.0;  // only the op paged_attention
};

// Owns: num_arenas arenas (copies of one layer's cache) and their tables, and
//   the weights of the layer, which it may share. The pages of a sequence are
//   in random order.
class AttentionLayers {
 public:
  struct Options {
    model::ModelShape shape;  // only its attention is used
    std::string plan;         // see Create
    int64_t page_tokens = 64;
    // The number of slots in an arena, enough for all sequences of a launch.
    int64_t slots = 0;
    int64_t num_arenas = 1;
    bool lift_prompts = false;  // see worker::ServeOptions
    uint64_t seed = 1;
    // The weights of another object with the same shape, plan, lift_prompts,
    // seed and device, to save the time for making them. Null: makes its own
    // weights.
    std::shared_ptr<const worker::ModelWeights> weights;
    // The device, which must outlive this object. Null: the CPU, with the
    // threads of `pool`.
    kernels::Device* device = nullptr;
    // The timer for this device, which must outlive this object. Null: uses the
    // CPU's clock.
    StepTimer* timer = nullptr;
  };

  // `plan` is a preset's name, or "dense-4bit" for whole keys and values as
  // 4-bit codes. `pool` must outlive the object. Errors: those of making the
  // plan and the weights, and of allocating memory.
  static absl::StatusOr<std::unique_ptr<AttentionLayers>> Create(
      const Options& options, base::ThreadPool* pool);

  // Runs one launch over the next arena. If the shape differs from that of the
  // previous launch, first determines the workspace that the launch needs.
  absl::StatusOr<LaunchTime> Run(const LaunchShape& launch);

  const model::DecoderSpec& spec() const { return spec_; }
  const plan::ResolvedPlan& plan() const { return *plan_; }
  const cache::PageLayout& layout() const { return *layout_; }
  // True if, for prompts, some cached latents are decompressed to whole heads
  // before attention.
  bool lifts_prompts() const {
    return worker::LiftsPrompts(*weights_->layers.front().attention);
  }
  std::shared_ptr<const worker::ModelWeights> weights() const {
    return weights_;
  }
  // The attention kernels in use. Call it only on a GPU.
  const kernels::AttentionKernels& kernels() const {
    return attention_.front().kernels();
  }
  int64_t num_arenas() const { return static_cast<int64_t>(attention_.size()); }
  // The bytes that one layer stores for a token, without padding.
  double bytes_per_slot() const;

  // Like bytes_per_slot, but needs no object. Used to choose num_arenas.
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
  // Allocates device memory and copies `host` into it.
  template <typename T>
  absl::Status Put(const std::vector<T>& host, kernels::DeviceBuffer* buffer);

  base::ThreadPool* const pool_;
  kernels::CpuDevice cpu_;
  CpuStepTimer cpu_timer_;
  kernels::Device& device_;
  StepTimer& timer_;
  const kernels::Activations activations_;
  std::unique_ptr<kernels::Stream> stream_;
  model::DecoderSpec spec_;  // has one layer for each arena
  std::shared_ptr<const plan::ResolvedPlan> plan_;
  std::unique_ptr<cache::PageLayout> layout_;
  std::shared_ptr<const worker::ModelWeights> weights_;  // one layer's
  std::unique_ptr<worker::KvArenas> arenas_;
  std::vector<uint64_t> rope_steps_;
  kernels::DeviceTables tables_{&device_};
  kernels::HadamardTables hadamard_{&device_};
  kernels::DeviceBuffer fresh_;
  std::vector<worker::LayerAttention> attention_;  // one for each arena

  // The shape of the last launch.
  LaunchShape launch_;
  std::vector<int32_t> block_tables_;  // all pages of an arena in random order
  std::vector<kernels::AttentionSequence> sequences_;
  std::vector<worker::SequenceRows> rows_;
  std::vector<kernels::AttentionStep> steps_;
  // Copies of block_tables_ and sequences_, and the other inputs of a launch,
  // in device memory.
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
