// Test support: DeviceLaunch runs paged_attention on the emulated device, with
// the contents of a LatentCache.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/attention/ops.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels::emulation {

// Copies a cache and the arguments of an attention launch to the device, and
// runs the launch there.
class DeviceLaunch {
 public:
  // `args` and `cache` are in host memory. On the device, `slots_before` slots
  // precede the cached slots of each sequence. Their pages are marked
  // as released.
  DeviceLaunch(EmulatedTest& test, const LatentCache& cache,
               const PagedAttentionArgs& args,
               const std::vector<LatentAsk>& asks, DType dtype,
               int64_t slots_before = 0)
      : test_(test), dtype_(dtype), shape_(OnDevice(args)) {
    shape_.dtype = dtype;
    for (int64_t p = 0; p < args.num_key_parts; ++p) {
      const AttentionKeyPartArgs& part = args.keys[p];
      const TestPart& from = cache.parts()[static_cast<size_t>(p)];
      keys_.push_back({Latents(from), part.group_of_head, part.query_column,
                       nullptr, Exact(from)});
      if (part.rebuild == nullptr) continue;
      KeyRebuild& rebuild = rebuilds_.emplace_back(OnDevice(*part.rebuild));
      rebuild.bias =
          Table(part.rebuild->bias, args.num_kv_heads * rebuild.dims);
      rebuild.up =
          Matrices(part.rebuild->up, part, rebuild.dims, args.num_kv_heads);
      keys_.back().rebuild = &rebuild;
    }
    for (int64_t p = 0; p < args.num_value_parts; ++p) {
      const AttentionValuePartArgs& part = args.values[p];
      const TestPart& from =
          cache.parts()[static_cast<size_t>(args.num_key_parts + p)];
      values_.push_back(
          {Latents(from), part.group_of_head, part.out_column, Exact(from)});
      if (part.lift == nullptr) continue;
      ValueLift& lift = lifts_.emplace_back(OnDevice(*part.lift));
      lift.up = Matrices(part.lift->up, part, lift.dims, args.num_kv_heads);
      values_.back().lift = &lift;
    }
    shape_.keys = keys_.data();
    shape_.values = values_.data();
    if (args.metadata.num_units > 0) {
      shape_.metadata.arena =
          Arena(args.metadata.arena, cache.metadata_memory());
      metadata_ = buffers_.size() - 1;
    }
    int64_t rows = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) {
      AttentionSequence sequence = args.sequences[s];
      const int64_t slots = sequence.first_slot + sequence.num_rows;
      const int64_t pages = (slots + args.page_tokens - 1) / args.page_tokens;
      const int32_t* table = sequence.block_table.device_address();
      buffers_.push_back(test.Put(std::vector<int32_t>(table, table + pages)));
      const int64_t pages_before = slots_before / args.page_tokens;
      sequence.block_table = buffers_.back().as<int32_t>() + -pages_before;
      sequence.first_live_index += pages_before;
      sequence.first_slot += slots_before;
      const int64_t from = asks[static_cast<size_t>(s)].sequence;
      buffers_.push_back(test.Put(cache.side_table(from)));
      sequence.side_pages = buffers_.back().as<int32_t>();
      sequence.positions = Table(sequence.positions.device_address(), slots);
      sequences_.push_back(sequence);
      rows = std::max(rows, sequence.first_row + sequence.num_rows);
    }
    q_ = test.PutNumbers({args.q, args.q + rows * args.q_row_stride}, dtype);
    out_ = test.PutNumbers(
        std::vector<float>(static_cast<size_t>(rows * args.out_row_stride),
                           kPoison),
        dtype);
    on_device_ = test.Put(sequences_);
  }

  PagedAttentionParams& shape() { return shape_; }

  // Moves the queries in memory, so that `numbers` poisoned numbers precede
  // them.
  void MoveQueries(int64_t numbers) {
    std::vector<float> q = test_.GetNumbers(q_, dtype_);
    q.insert(q.begin(), static_cast<size_t>(numbers), kPoison);
    q_ = test_.PutNumbers(q, dtype_);
    q_at_ = numbers * DTypeBytes(dtype_);
  }

  std::vector<float> Run() {
    auto prepared = Prepare(test_.device(), shape_);
    KVASIR_EXPECT_OK(prepared.status());
    if (!prepared.ok()) return {};
    kernels_ = prepared->kernels();
    auto step = DivideStep(*prepared, sequences_);
    KVASIR_EXPECT_OK(step.status());
    const DevicePtr<char> q = q_.as<char>() + q_at_;
    const AttentionRows rows = {q.as<float>(), out_.as<float>(),
                                on_device_.as<AttentionSequence>(),
                                static_cast<int64_t>(sequences_.size())};
    Workspace counter = Workspace::Counting();
    KVASIR_EXPECT_OK(
        PagedAttention(test_.stream(), *prepared, rows, *step, counter));
    memory_ = test_.Memory(counter.peak_bytes());
    Workspace workspace(memory_.data(), memory_.bytes());
    KVASIR_EXPECT_OK(
        PagedAttention(test_.stream(), *prepared, rows, *step, workspace));
    return test_.GetNumbers(out_, dtype_);
  }

  // The bytes of the slot metadata (LatentCache::metadata_memory) after Run.
  std::vector<char> Metadata(const LatentCache& cache) {
    const std::vector<char> arena = test_.Get<char>(buffers_[metadata_]);
    return {arena.end() -
                static_cast<std::ptrdiff_t>(cache.metadata_memory().size()),
            arena.end()};
  }
  // The names of the kernels that ran.
  const AttentionKernels& kernels() const { return kernels_; }
  // Returns the work items into which the launch divides each sequence.
  std::vector<SequenceItems> Items() {
    const size_t bytes = (sequences_.size() + 1) * sizeof(SequenceItems);
    std::vector<SequenceItems> items(sequences_.size() + 1);
    KVASIR_EXPECT_OK(
        ReadBack(test_.stream(), items.data(), memory_.data(), bytes));
    return items;
  }

 private:
  template <typename T>
  DevicePtr<const T> Table(const T* from, int64_t count) {
    if (from == nullptr) return nullptr;
    buffers_.push_back(test_.Put(std::vector<T>(from, from + count)));
    return buffers_.back().template as<T>();
  }
  // Copies the matrices of a part that is rebuilt or lifted, one per KV head.
  template <typename Part>
  const DevicePtr<const float>* Matrices(const LaunchPtr<const float>* up,
                                         const Part& part, int64_t dims,
                                         int64_t num_kv_heads) {
    if (up == nullptr) return nullptr;
    auto& matrices = up_.emplace_back();
    for (int64_t j = 0; j < num_kv_heads; ++j) {
      const LatentGroup& group = part.latents.groups[part.group_of_head[j]];
      matrices.push_back(Table<float>(up[j], dims * group.width));
    }
    return matrices.data();
  }
  LatentPart Latents(const TestPart& from) {
    LatentPart part = OnDevice(from.part);
    part.arena = Arena(from.part.arena, from.memory());
    part.static_scale = Table(from.part.static_scale, RowWidth(from.part));
    part.static_minimum = Table(from.part.static_minimum, RowWidth(from.part));
    return part;
  }

  // Copies the exact rows of a part to the device. If the part has none, the
  // result is empty.
  const ExactRows* Exact(const TestPart& from) {
    ExactRows& rows = exact_.emplace_back(OnDevice(from.exact));
    rows.ring.arena = Arena(from.exact.ring.arena, from.ring_memory());
    rows.fresh.arena = Arena(from.exact.fresh.arena, from.fresh_memory());
    return &rows;
  }
  // Copies the memory of an arena to the device. Returns the start of the arena
  // there, which is equally far before the memory.
  DevicePtr<void> Arena(const void* arena, const std::vector<char>& memory) {
    if (memory.empty()) return nullptr;
    const int64_t before = memory.data() - static_cast<const char*>(arena);
    buffers_.push_back(
        test_.Memory(static_cast<size_t>(before) + memory.size()));
    const DevicePtr<char> begin = buffers_.back().as<char>();
    KVASIR_EXPECT_OK(
        test_.device().Write(begin + before, memory.data(), memory.size()));
    return begin;
  }

  EmulatedTest& test_;
  const DType dtype_;
  PagedAttentionParams shape_;
  std::deque<KeyRebuild> rebuilds_;
  std::deque<ValueLift> lifts_;
  std::deque<std::vector<DevicePtr<const float>>> up_;
  std::deque<ExactRows> exact_;
  std::vector<AttentionKeyPart> keys_;
  std::vector<AttentionValuePart> values_;
  std::vector<AttentionSequence> sequences_;
  std::vector<DeviceBuffer> buffers_;
  size_t metadata_ = 0;  // index in buffers_
  DeviceBuffer q_, out_, on_device_, memory_;
  int64_t q_at_ = 0;  // offset of the queries in bytes
  AttentionKernels kernels_;
};

}  // namespace kvasir::kernels::emulation
