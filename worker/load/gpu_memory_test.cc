// Tests how a model divides a GPU's memory. A fake CUDA runtime runs the
// kernels on the emulator.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/emulation/emulator.h"
#include "kernels/op_table/op_table.h"
#include "worker/load/loaded_model.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GpuMemoryTest : public ::testing::Test {
 protected:
  GpuMemoryTest() : emulator_({}) {
    runtime_.OnRun(
        [this](const kernels::KernelLaunch& launch) { emulator_.Run(launch); });
    runtime_.code_bytes = 10 << 20;
    const kernels::DeviceOps all = kernels::emulated::Ops();
    ops_.assign(all.ops, all.ops + all.count);
    request_.model.random_weights = true;
    request_.model.shape = "kvasir-tiny";
    request_.model.threads = 1;
    request_.model.device.device = "cuda";
    request_.model.page_tokens = 16;
    request_.max_model_len = 1024;
    request_.max_num_seqs = 4;
    request_.max_batched_tokens = 4;
    request_.open_cuda = [this](const kernels::CudaDeviceOptions& options)
        -> absl::StatusOr<std::unique_ptr<kernels::Device>> {
      KVASIR_ASSIGN_OR_RETURN(
          std::unique_ptr<kernels::CudaDevice> device,
          kernels::CudaDevice::Make(options, &runtime_,
                                    {ops_.data(), ops_.size()}));
      return device;
    };
  }

  static kernels::DeviceMemory MemoryOf(const LoadedModel& model) {
    const auto memory = model.rank().device().memory();
    KVASIR_EXPECT_OK(memory);
    return memory.value_or(kernels::DeviceMemory());
  }
  static int64_t TakenBy(const LoadedModel& model) {
    const kernels::DeviceMemory memory = MemoryOf(model);
    return memory.total_bytes - memory.free_bytes;
  }

  kernels::emulation::Emulator emulator_;
  kernels::cuda::FakeRuntime runtime_;
  std::vector<kernels::DeviceOp> ops_;
  LoadRequest request_;
};

TEST_F(GpuMemoryTest,
       ThePoolGetsTheAllowedGpuMemoryThatTheLargestStepLeavesFree) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto model, LoadedModel::Load(request_));
  const double total = static_cast<double>(MemoryOf(*model).total_bytes);
  // There is enough memory, so the pool holds as many sequences of full length
  // as may run.
  const int64_t all = model->kv_pool_bytes();
  const int64_t one = all / request_.max_num_seqs;
  EXPECT_EQ(one, model->layout().BytesAtLength(1024, 4));
  const int64_t beside = TakenBy(*model) - all;
  EXPECT_GT(beside, 110 << 20);  // CUDA's context and code
  model = nullptr;

  // Lowers the utilization so that the pool can have only half as many bytes as
  // before.
  request_.gpu_memory_utilization =
      static_cast<double>(beside + all / 2) / total;
  KVASIR_ASSERT_OK_AND_ASSIGN(model, LoadedModel::Load(request_));
  const auto most =
      static_cast<int64_t>(request_.gpu_memory_utilization * total);
  EXPECT_LE(TakenBy(*model), most);
  // The 8 MiB of slack cover the rounding of CUDA's allocations.
  EXPECT_GE(TakenBy(*model), most - (8 << 20));
  EXPECT_LT(model->kv_pool_bytes(), all);
  EXPECT_GE(model->kv_pool_bytes(), one);
  // The model runs with the small pool.
  worker::DirectRunner runner(&model->rank().executor(), &model->layout(),
                              model->pages());
  const std::vector<int32_t> prompt = {5, 1, 4};
  KVASIR_ASSERT_OK(runner.Run({{.sequence_id = 1,
                                .token_ids = prompt,
                                .sample = worker::GreedySample()}}));
  model = nullptr;

  // A pool whose size was given must also fit below gpu_memory_utilization. A
  // pool for two sequences fits.
  request_.kv_cache_bytes = 2 * one;
  KVASIR_ASSERT_OK_AND_ASSIGN(model, LoadedModel::Load(request_));
  EXPECT_EQ(model->kv_pool_bytes(), 2 * one);
  model = nullptr;
  // The pool for all sequences does not fit. The error comes only after a first
  // step, when it is known how much memory is needed besides the pool.
  request_.kv_cache_bytes = all;
  EXPECT_THAT(
      LoadedModel::Load(request_),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     AllOf(HasSubstr(absl::StrCat("--kv-cache-bytes asks for ",
                                                  all, "; lower it")),
                           HasSubstr("--gpu-memory-utilization"))));
  request_.kv_cache_bytes = int64_t{1} << 30;
  bool packed = false;
  request_.progress = [&packed](int64_t, int64_t) { packed = true; };
  EXPECT_THAT(LoadedModel::Load(request_),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             AllOf(HasSubstr("lower --kv-cache-bytes"),
                                   HasSubstr("--gpu-memory-utilization"))));
  EXPECT_FALSE(packed);
}

TEST_F(GpuMemoryTest, TheErrorForTooLittleMemoryForOneSequenceStatesTheSizes) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto model, LoadedModel::Load(request_));
  const double total = static_cast<double>(MemoryOf(*model).total_bytes);
  const int64_t beside = TakenBy(*model) - model->kv_pool_bytes();
  model = nullptr;
  // The error comes only after a first step, because CUDA loads its code in
  // that step.
  request_.gpu_memory_utilization =
      static_cast<double>(beside - (4 << 20)) / total;
  EXPECT_THAT(
      LoadedModel::Load(request_),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     AllOf(HasSubstr("for the KV cache 0 bytes are left"),
                           HasSubstr("one sequence of 1024 tokens takes"),
                           HasSubstr("raise --gpu-memory-utilization"))));
  // Weights that do not fit are refused before any weight is read.
  request_.gpu_memory_utilization = 0.101;
  bool packed = false;
  request_.progress = [&packed](int64_t, int64_t) { packed = true; };
  EXPECT_THAT(LoadedModel::Load(request_),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             AllOf(HasSubstr("weights of"),
                                   HasSubstr("take a smaller model"))));
  EXPECT_FALSE(packed);
}

// The host pool is in host memory, which is checked separately from the GPU's
// memory.
TEST_F(GpuMemoryTest, AHostPoolIsLimitedByHostMemoryAndNotByGpuMemory) {
  request_.host_pool_bytes = int64_t{1} << 60;
  EXPECT_THAT(LoadedModel::Load(request_),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             AllOf(HasSubstr("the host has"),
                                   HasSubstr("--host-pool-bytes"))));
  // A host pool larger than the GPU's whole memory is allowed.
  runtime_.total_bytes = size_t{500} << 20;
  request_.host_pool_bytes = int64_t{501} << 20;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto model, LoadedModel::Load(request_));
  EXPECT_GT(model->host_pool_bytes(), int64_t{500} << 20);
}

TEST_F(GpuMemoryTest,
       TheDeviceAutoUsesTheCpuIfTheGpuLacksAKernelThatThePlanNeeds) {
  std::erase_if(ops_,
                [](const auto& op) { return op.op == std::string("norm"); });
  EXPECT_THAT(LoadedModel::Load(request_),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("norm: the device has no kernel")));
  request_.model.device.device = "auto";
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto model, LoadedModel::Load(request_));
  EXPECT_EQ(model->rank().device().name(), "cpu");
}

}  // namespace
}  // namespace kvasir::cli
