#include "kernels/cuda/real_runtime.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

namespace kvasir::kernels::cuda {
namespace {

// Checks that the named errors have the same numbers as in CUDA.
static_assert(static_cast<int>(Result::kOutOfMemory) ==
              cudaErrorMemoryAllocation);
static_assert(static_cast<int>(Result::kOldDriver) ==
              cudaErrorInsufficientDriver);
static_assert(static_cast<int>(Result::kNoDevice) == cudaErrorNoDevice);
static_assert(static_cast<int>(Result::kNoImage) ==
              cudaErrorNoKernelImageForDevice);
static_assert(static_cast<int>(Result::kIllegalState) == cudaErrorIllegalState);
static_assert(static_cast<int>(Result::kCaptureUnsupported) ==
              cudaErrorStreamCaptureUnsupported);
static_assert(static_cast<int>(Result::kCaptureInvalidated) ==
              cudaErrorStreamCaptureInvalidated);
static_assert(static_cast<int>(Result::kCapturedEvent) ==
              cudaErrorCapturedEvent);
static_assert(static_cast<int>(Result::kCaptureWrongThread) ==
              cudaErrorStreamCaptureWrongThread);
static_assert(sizeof(StreamHandle) == sizeof(cudaStream_t));

// Converts an error of CUDA, and clears CUDA's record of it, so that the next
// call does not report it again. Errors that have made the device unusable
// cannot be cleared.
Result Of(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return static_cast<Result>(error);
}
cudaStream_t Stream(StreamHandle stream) {
  return reinterpret_cast<cudaStream_t>(stream);
}
cudaEvent_t Event(EventHandle event) {
  return reinterpret_cast<cudaEvent_t>(event);
}

cudaGraph_t Graph(GraphHandle graph) {
  return reinterpret_cast<cudaGraph_t>(graph);
}
cudaGraphExec_t Exec(ExecHandle exec) {
  return reinterpret_cast<cudaGraphExec_t>(exec);
}

class CudartRuntime final : public Runtime {
 public:
  std::string Describe(Result result) override {
    const auto error = static_cast<cudaError_t>(result);
    return absl::StrCat(cudaGetErrorName(error), " (", static_cast<int>(result),
                        "): ", cudaGetErrorString(error));
  }
  Result DriverVersion(int* version) override {
    return Of(cudaDriverGetVersion(version));
  }
  int RuntimeVersion() override { return CUDART_VERSION; }
  Result DeviceCount(int* count) override {
    return Of(cudaGetDeviceCount(count));
  }
  Result Properties(int device, DeviceProperties* properties) override {
    cudaDeviceProp found;
    const Result result = Of(cudaGetDeviceProperties(&found, device));
    if (result != Result::kOk) return result;
    properties->name = found.name;
    properties->major = found.major;
    properties->minor = found.minor;
    properties->multiprocessors = found.multiProcessorCount;
    properties->memory_bytes = static_cast<int64_t>(found.totalGlobalMem);
    properties->l2_bytes = found.l2CacheSize;
    properties->shared_bytes =
        static_cast<int64_t>(found.sharedMemPerBlockOptin);
    return result;
  }

  Result Use(int device) override { return Of(cudaSetDevice(device)); }

  Result MemoryInfo(size_t* free_bytes, size_t* total_bytes) override {
    return Of(cudaMemGetInfo(free_bytes, total_bytes));
  }
  Result Allocate(void** memory, size_t bytes) override {
    return Of(cudaMalloc(memory, bytes));
  }
  Result Free(void* memory) override { return Of(cudaFree(memory)); }
  Result AllocateHost(void** memory, size_t bytes) override {
    return Of(cudaHostAlloc(memory, bytes,
                            cudaHostAllocPortable | cudaHostAllocMapped));
  }
  Result FreeHost(void* memory) override { return Of(cudaFreeHost(memory)); }

  Result MakeStream(StreamHandle* stream) override {
    return Of(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream),
                                        cudaStreamNonBlocking));
  }
  Result DestroyStream(StreamHandle stream) override {
    return Of(cudaStreamDestroy(Stream(stream)));
  }
  Result SynchronizeStream(StreamHandle stream) override {
    return Of(cudaStreamSynchronize(Stream(stream)));
  }
  Result SynchronizeDevice() override { return Of(cudaDeviceSynchronize()); }

  Result MakeEvent(EventHandle* event) override {
    return Of(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                       cudaEventDisableTiming));
  }
  Result DestroyEvent(EventHandle event) override {
    return Of(cudaEventDestroy(Event(event)));
  }
  Result RecordEvent(EventHandle event, StreamHandle stream) override {
    return Of(cudaEventRecord(Event(event), Stream(stream)));
  }
  Result WaitForEvent(EventHandle event) override {
    return Of(cudaEventSynchronize(Event(event)));
  }
  Result QueryEvent(EventHandle event, bool* over) override {
    const cudaError_t error = cudaEventQuery(Event(event));
    const Result result = Of(error);
    *over = error == cudaSuccess;
    return error == cudaErrorNotReady ? Result::kOk : result;
  }

  Result CopyAsync(void* to, const void* from, size_t bytes,
                   StreamHandle stream) override {
    // cudaMemcpyDefault finds the direction of the copy from the addresses.
    // "Device" memory may also be in the host pool, which is host memory.
    return Of(
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Stream(stream)));
  }
  Result BeginCapture(StreamHandle stream) override {
    // Thread-local mode: calls of other threads, such as NCCL's watchdog, do
    // not affect the capture.
    return Of(cudaStreamBeginCapture(Stream(stream),
                                     cudaStreamCaptureModeThreadLocal));
  }
  Result EndCapture(StreamHandle stream, GraphHandle* graph) override {
    return Of(cudaStreamEndCapture(Stream(stream),
                                   reinterpret_cast<cudaGraph_t*>(graph)));
  }
  Result DestroyGraph(GraphHandle graph) override {
    return Of(cudaGraphDestroy(Graph(graph)));
  }
  Result InstantiateGraph(GraphHandle graph, StreamHandle stream,
                          ExecHandle* exec) override {
    cudaGraphInstantiateParams params = {};
    params.flags = cudaGraphInstantiateFlagUpload;
    params.uploadStream = Stream(stream);
    return Of(cudaGraphInstantiateWithParams(
        reinterpret_cast<cudaGraphExec_t*>(exec), Graph(graph), &params));
  }
  Result DestroyExec(ExecHandle exec) override {
    return Of(cudaGraphExecDestroy(Exec(exec)));
  }
  Result LaunchGraph(ExecHandle exec, StreamHandle stream) override {
    return Of(cudaGraphLaunch(Exec(exec), Stream(stream)));
  }
  Result AllowSharedBytes(const void* function, uint32_t bytes) override {
    return Of(cudaFuncSetAttribute(function,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(bytes)));
  }
  Result Launch(const KernelLaunch& launch, StreamHandle stream) override {
    void* args[] = {const_cast<void*>(launch.args)};
    const dim3 grid(launch.grid_x, launch.grid_y);
    const dim3 threads(launch.threads);
    return Of((launch.ctas_together
                   ? cudaLaunchCooperativeKernel
                   : cudaLaunchKernel)(launch.function, grid, threads, args,
                                       launch.shared_bytes, Stream(stream)));
  }
};

}  // namespace

Runtime& RealRuntime() {
  static CudartRuntime runtime;
  return runtime;
}

}  // namespace kvasir::kernels::cuda
