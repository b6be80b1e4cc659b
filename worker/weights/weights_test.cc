#include "worker/weights/weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status_matchers.h"
#include "kernels/testing/strict_device.h"
#include "model/checkpoint/weight_tiles.h"
#include "model/shapes/shape_config.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"
#include "worker/weights/weight_jobs.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kernels::DType;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A CPU device that expects matrices in the format of a GPU.
class RowsDevice final : public kernels::CpuDevice {
 public:
  RowsDevice(base::ThreadPool* pool, DType activations)
      : CpuDevice(pool), activations_(activations) {}
  kernels::WeightLayout weight_layout() const override {
    return kernels::WeightLayout::kRows;
  }
  DType activations() const override { return activations_; }

 private:
  const DType activations_;
};

// A random source that stores some tensors in types other than bf16.
class MixedSource final : public WeightSource {
 public:
  explicit MixedSource(std::map<std::string, DType> types)
      : types_(std::move(types)) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
      sources_[dtype] = std::make_unique<RandomSource>(TinyShape(), 1, dtype);
    }
  }
  absl::StatusOr<DType> TypeOf(const std::string& name) const override {
    const auto found = types_.find(name);
    return found == types_.end() ? DType::kBf16 : found->second;
  }
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override {
    return sources_.begin()->second->SizeOf(name);
  }
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override {
    return sources_[*TypeOf(name)]->Read(name, range, buffer, consume);
  }
  std::string WeightTiles() const override {
    return model::WeightTilesText("mixed");
  }

 private:
  std::map<std::string, DType> types_;
  std::map<DType, std::unique_ptr<RandomSource>> sources_;
};

struct Loaded {
  std::unique_ptr<base::ThreadPool> pool;
  std::unique_ptr<kernels::Device> device;
  ModelWeights weights;
};

Loaded Load(WeightSource* source, plan::TpShard shard, int threads = 1,
            size_t buffer_bytes = 1 << 20,
            std::optional<DType> gpu_activations = std::nullopt) {
  Loaded loaded;
  auto spec = model::SpecOfShape(TinyShape());
  KVASIR_EXPECT_OK(spec);
  loaded.pool = std::make_unique<base::ThreadPool>(threads);
  loaded.device =
      gpu_activations.has_value()
          ? std::make_unique<RowsDevice>(loaded.pool.get(), *gpu_activations)
          : std::make_unique<kernels::CpuDevice>(loaded.pool.get());
  auto weights = LoadWeights(
      *spec,
      Served(
          plan::FullRankPlan(model::AttentionShapeOf(*spec), kvasir::v1::BF16),
          *spec, {.lift_prompts = false}, shard),
      source, loaded.device.get(),
      {.pool = loaded.pool.get(), .read_buffer_bytes = buffer_bytes});
  KVASIR_EXPECT_OK(weights);
  if (weights.ok()) loaded.weights = *std::move(weights);
  return loaded;
}

// A device that stages writes, and counts the host memory that is staged.
class StagingDevice final : public kernels::CpuDevice {
 public:
  using CpuDevice::CpuDevice;
  bool stages_writes() const override { return true; }
  absl::StatusOr<void*> BeginWrite(kernels::DevicePtr<void> memory,
                                   size_t bytes) override {
    base::MutexLock lock(&mutex_);
    staged_ += static_cast<int64_t>(bytes);
    most_ = std::max(most_, staged_);
    return CpuDevice::BeginWrite(memory, bytes);
  }
  absl::Status EndWrite(kernels::DevicePtr<void> memory, void* host,
                        size_t bytes) override {
    base::MutexLock lock(&mutex_);
    staged_ -= static_cast<int64_t>(bytes);
    return CpuDevice::EndWrite(memory, host, bytes);
  }
  int64_t most() {
    base::MutexLock lock(&mutex_);
    return most_;
  }

 private:
  base::Mutex mutex_;
  int64_t staged_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t most_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Without a limit, the largest matrices of all threads together could exceed a
// host's memory.
TEST(WeightsTest, TheHostMemoryForStagingWeightsStaysBelowItsLimit) {
  RandomSource source(TinyShape(), 1, DType::kBf16);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto spec, model::SpecOfShape(TinyShape()));
  const auto plan = Served(
      plan::FullRankPlan(model::AttentionShapeOf(spec), kvasir::v1::BF16), spec,
      {.lift_prompts = false});
  const auto most_at = [&](int64_t limit) {
    base::ThreadPool pool(8);
    StagingDevice device(&pool);
    const auto weights = LoadWeights(
        spec, plan, &source, &device,
        {.pool = &pool, .read_buffer_bytes = 64, .max_staged_bytes = limit});
    KVASIR_EXPECT_OK(weights);
    return device.most();
  };
  // With a limit of 1 byte, matrices are staged one at a time, so the most that
  // is staged is the largest matrix.
  const int64_t largest = most_at(1);
  EXPECT_GT(largest, 1);
  EXPECT_LE(most_at(2 * largest), 2 * largest);
}

TEST(WeightsTest, EachRankLoadsItsPartOfEveryMatrix) {
  RandomSource source(TinyShape(), 1, DType::kBf16);
  const std::string layer = "model.layers.1.";
  const auto q = Rows(source, layer + "self_attn.q_proj.weight", 32);
  const auto k = Rows(source, layer + "self_attn.k_proj.weight", 32);
  const auto o = Rows(source, layer + "self_attn.o_proj.weight", 64);
  const auto up = Rows(source, layer + "mlp.up_proj.weight", 32);
  const auto down = Rows(source, layer + "mlp.down_proj.weight", 48);
  const auto head = Rows(source, "lm_head.weight", 32);
  const auto embedding = Rows(source, "model.embed_tokens.weight", 32);
  for (const int64_t size : {1, 2, 4, 8}) {
    for (int64_t rank = 0; rank < size; ++rank) {
      const Loaded loaded = Load(&source, {rank, size});
      const LayerWeights& weights = loaded.weights.layers[1];
      const int64_t q_rows = 64 / size;
      // With 8 ranks, each of the 4 KV heads is on two ranks.
      const int64_t kv_rows = size == 8 ? 8 : 32 / size;
      const int64_t kv_first = size == 8 ? rank / 2 * 8 : rank * kv_rows;
      const int64_t features = 48 / size;
      ASSERT_EQ(weights.qkv.n, q_rows + 2 * kv_rows);
      // The 1237 ids are 39 panels of 32 ids, which the ranks divide.
      const plan::IdRange& ids = loaded.weights.shard.ids;
      ASSERT_EQ(ids.first, 39 * rank / size * 32);
      ASSERT_EQ(ids.end(),
                rank + 1 == size ? 1237 : 39 * (rank + 1) / size * 32);
      ASSERT_EQ(loaded.weights.head.n, ids.count);
      const auto* const rows = static_cast<const kernels::Bf16*>(
          loaded.weights.embedding.device_address());
      for (int64_t id = 0; id < ids.count; ++id) {
        const auto row = static_cast<size_t>(ids.first + id);
        ASSERT_EQ(Element(loaded.weights.head, 7, id), head[row][7]);
        ASSERT_EQ(kernels::ToFloat(rows[id * 32 + 7]), embedding[row][7]);
      }
      for (int64_t i = 0; i < 32; i += 5) {
        const auto column = static_cast<size_t>(i);
        for (int64_t row = 0; row < q_rows; ++row) {
          ASSERT_EQ(Element(weights.qkv, i, row),
                    q[static_cast<size_t>(rank * q_rows + row)][column]);
        }
        for (int64_t row = 0; row < kv_rows; ++row) {
          ASSERT_EQ(Element(weights.qkv, i, q_rows + row),
                    k[static_cast<size_t>(kv_first + row)][column]);
        }
        for (int64_t row = 0; row < features; ++row) {
          ASSERT_EQ(Element(weights.gate_up, i, features + row),
                    up[static_cast<size_t>(rank * features + row)][column]);
          ASSERT_EQ(Element(weights.down, row, i),
                    down[column][static_cast<size_t>(rank * features + row)]);
        }
        for (int64_t row = 0; row < q_rows; ++row) {
          ASSERT_EQ(Element(weights.o, row, i),
                    o[column][static_cast<size_t>(rank * q_rows + row)]);
        }
      }
    }
  }
}

TEST(WeightsTest,
     TensorsOfDifferentDataTypesInOneMatrixAreWidenedWithoutRounding) {
  const std::string layer = "model.layers.0.self_attn.";
  MixedSource source({{layer + "k_proj.weight", DType::kF16}});
  const auto k = Rows(source, layer + "k_proj.weight", 32);
  const Loaded loaded = Load(&source, {});
  const kernels::PackedMatrix& qkv = loaded.weights.layers[0].qkv;
  EXPECT_EQ(qkv.dtype, DType::kF32);
  EXPECT_EQ(loaded.weights.layers[1].qkv.dtype, DType::kBf16);
  for (int64_t row = 0; row < 32; ++row) {
    ASSERT_EQ(Element(qkv, 3, 64 + row), k[static_cast<size_t>(row)][3]);
  }
}

// Tensor cores multiply activations and weights of the same 16-bit type.
// Regression test: a checkpoint of another type ran on a slow kernel.
TEST(WeightsTest, WeightMatricesOnAGpuHaveTheDataTypeOfItsActivations) {
  const std::string layer = "model.layers.0.self_attn.";
  MixedSource source({{layer + "k_proj.weight", DType::kF32},
                      {layer + "o_proj.weight", DType::kF16}});
  const auto k = Rows(source, layer + "k_proj.weight", 32);
  const auto o = Rows(source, layer + "o_proj.weight", 64);
  const auto down = Rows(source, "model.layers.0.mlp.down_proj.weight", 48);
  const auto rounded = [](DType dtype, float number) {
    return kernels::VisitDType(dtype, [number](auto zero) {
      return kernels::ToFloat(kernels::FromFloat<decltype(zero)>(number));
    });
  };
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const Loaded loaded = Load(&source, {}, 1, 200, dtype);
    const LayerWeights& weights = loaded.weights.layers[0];
    for (const kernels::PackedMatrix& matrix :
         {weights.qkv, weights.o, weights.gate_up, weights.down,
          loaded.weights.head}) {
      EXPECT_EQ(matrix.dtype, dtype);
      EXPECT_EQ(matrix.layout, kernels::WeightLayout::kRows);
    }
    for (int64_t row = 0; row < 32; ++row) {
      const auto at = static_cast<size_t>(row);
      ASSERT_EQ(Element(weights.qkv, 3, 64 + row), rounded(dtype, k[at][3]));
      ASSERT_EQ(Element(weights.o, 5, row), rounded(dtype, o[at][5]));
      ASSERT_EQ(Element(weights.down, 7, row), rounded(dtype, down[at][7]));
    }
    // CountWeightBytes must count exactly the bytes that LoadWeights allocates.
    auto spec = model::SpecOfShape(TinyShape());
    KVASIR_ASSERT_OK(spec);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const int64_t counted,
        CountWeightBytes(
            *spec,
            Served(plan::FullRankPlan(model::AttentionShapeOf(*spec),
                                      kvasir::v1::BF16),
                   *spec, {.lift_prompts = false}),
            &source, MatrixFormat::Of(*loaded.device)));
    EXPECT_EQ(
        counted,
        loaded.device->allocator().use(kernels::MemoryTag::kWeights).bytes);
    // For bfloat16, only layer 0's o_proj and its fused q, k and v are rounded.
    // For float16, everything except layer 0's o_proj is.
    EXPECT_EQ(loaded.weights.rounded_bytes,
              dtype == DType::kBf16
                  ? weights.qkv.bytes() + weights.o.bytes()
                  : loaded.weights.matrix_bytes - weights.o.bytes());
  }
  // With float32 activations, matrices keep their stored type, because kernels
  // widen weights to float32 without rounding.
  const Loaded floats = Load(&source, {}, 1, 200, DType::kF32);
  // the tensors that are fused to qkv have different types
  EXPECT_EQ(floats.weights.layers[0].qkv.dtype, DType::kF32);
  EXPECT_EQ(floats.weights.layers[0].o.dtype, DType::kF16);
  EXPECT_EQ(floats.weights.layers[0].down.dtype, DType::kBf16);
  EXPECT_EQ(floats.weights.rounded_bytes, 0);
}

TEST(WeightsTest,
     TheErrorForAWeightTooLargeForTheActivationsTypeNamesItsTensor) {
  RandomSource random(TinyShape(), 1, DType::kF32);
  const std::string large = "model.layers.1.mlp.down_proj.weight";
  ChangedSource source(
      &random, [&](const std::string& name, const WeightBlock& block,
                   const WeightSource::Consumer& consume) {
        if (name != large) return consume(block);
        const auto* const numbers = static_cast<const float*>(block.data);
        std::vector<float> changed(numbers,
                                   numbers + block.num_rows * block.columns);
        changed[1] = 70000.0f;
        WeightBlock other = block;
        other.data = changed.data();
        return consume(other);
      });
  auto spec = model::SpecOfShape(TinyShape());
  KVASIR_ASSERT_OK(spec);
  base::ThreadPool pool(1);
  const auto load = [&](DType activations) {
    RowsDevice device(&pool, activations);
    return LoadWeights(*spec,
                       Served(plan::FullRankPlan(model::AttentionShapeOf(*spec),
                                                 kvasir::v1::BF16),
                              *spec, {.lift_prompts = false}),
                       &source, &device, {.pool = &pool})
        .status();
  };
  EXPECT_THAT(load(DType::kF16),
              StatusIs(absl::StatusCode::kOutOfRange,
                       AllOf(HasSubstr("tensor " + large),
                             HasSubstr("70000 does not fit F16"))));
  KVASIR_EXPECT_OK(load(DType::kBf16));
}

TEST(WeightsTest, NumberOfThreadsAndSizeOfReadsDoNotChangeTheLoadedWeights) {
  RandomSource source(TinyShape(), 1, DType::kBf16);
  const Loaded one = Load(&source, {}, 1);
  const Loaded other = Load(&source, {}, 3, 200);
  const auto same = [](const kernels::PackedMatrix& a,
                       const kernels::PackedMatrix& b) {
    return a.bytes() == b.bytes() &&
           std::memcmp(a.data.device_address(), b.data.device_address(),
                       static_cast<size_t>(a.bytes())) == 0;
  };
  EXPECT_TRUE(same(one.weights.head, other.weights.head));
  for (size_t i = 0; i < one.weights.layers.size(); ++i) {
    const LayerWeights& a = one.weights.layers[i];
    const LayerWeights& b = other.weights.layers[i];
    EXPECT_TRUE(same(a.qkv, b.qkv));
    EXPECT_TRUE(same(a.o, b.o));
    EXPECT_TRUE(same(a.gate_up, b.gate_up));
    EXPECT_TRUE(same(a.down, b.down));
  }
  EXPECT_EQ(one.weights.matrix_bytes, other.weights.matrix_bytes);
}

TEST(WeightsTest, AllMemoryThatWeightsAllocateIsTaggedAsWeights) {
  RandomSource source(TinyShape(), 1, DType::kBf16);
  const Loaded loaded = Load(&source, {});
  EXPECT_EQ(loaded.device->allocator().use(kernels::MemoryTag::kWeights).bytes,
            loaded.device->allocator().total_use().bytes);
  EXPECT_GT(loaded.device->allocator().total_use().bytes,
            loaded.weights.matrix_bytes);
}

TEST(WeightsTest, AModelWhoseSizesAreNotDivisibleByTheNumberOfRanksIsRefused) {
  auto spec = model::SpecOfShape(TinyShape());
  KVASIR_ASSERT_OK(spec);
  EXPECT_THAT(ShardSizes::Create(*spec, {0, 3}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3")));
  spec->intermediate_size = 47;
  EXPECT_THAT(ShardSizes::Create(*spec, {0, 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("47")));
}

TEST(WeightsTest, TheErrorForAMissingTensorNamesIt) {
  model::ModelShape shape = TinyShape();
  RandomSource source(shape, 1, DType::kBf16);
  shape.num_layers = 3;
  auto spec = model::SpecOfShape(shape);
  KVASIR_ASSERT_OK(spec);
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  EXPECT_THAT(
      LoadWeights(*spec,
                  Served(plan::FullRankPlan(model::AttentionShapeOf(*spec),
                                            kvasir::v1::BF16),
                         *spec, {.lift_prompts = false}),
                  &source, &device, {.pool = &pool}),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.layers.2.")));
}

TEST(WeightSourceTest, TheErrorForAnInvalidRangeNamesItsRowsOrItsColumns) {
  RandomSource source(TinyShape(), 1, DType::kBf16);
  std::vector<std::byte> buffer(64);
  const auto refused = [&](const ReadRange& range, const std::string& text) {
    EXPECT_THAT(
        source.Read(std::string(model::kEmbeddingName), range, buffer,
                    [](const WeightBlock&) { return absl::OkStatus(); }),
        StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  refused({0, 1238, 0, 32},
          "cannot read 1238 rows from row 0 on: they are not inside the "
          "tensor, which has 1237 rows");
  refused({100, 128, 0, 32},
          "cannot read 128 rows from row 100 on: they are not whole tiles of "
          "128 rows");
  refused({0, 1237, -1, 32},
          "cannot read 32 columns from column -1 on: they are not inside the "
          "tensor, which has 32 columns");
  refused({0, 1237, 0, 16},
          "cannot read 16 columns from column 0 on: they are not whole tiles "
          "of 512 columns");
}

TEST(WeightJobsDeathTest,
     AnEmptyWeightJobLeavesDeviceMemoryUnreadableForTheHost) {
  RandomSource source(TinyShape(), 1, DType::kF32);
  base::ThreadPool pool(1);
  const auto device = kernels::MakeStrictDevice(&pool);
  std::vector<kernels::DeviceBuffer> buffers;
  WeightJobs jobs(&source, device.get(), &buffers);
  const TensorRows no_rows = {std::string(model::kEmbeddingName), 32, {}};
  kernels::DevicePtr<const float> zero;
  kernels::DevicePtr<const float> nothing;
  KVASIR_ASSERT_OK(jobs.Floats({no_rows}, 1, &zero));
  KVASIR_ASSERT_OK(jobs.Floats({no_rows}, 0, &nothing));
  KVASIR_ASSERT_OK(jobs.Run({.pool = &pool}));
  const volatile float* const there = zero.device_address();
  EXPECT_DEATH((void)*there, "");
}

}  // namespace
}  // namespace kvasir::worker
