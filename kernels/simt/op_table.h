// The ops of a GPU's back end. C++17 and free of Abseil. An op is one line here
// and one in op_table.cu.
#pragma once

#include "kernels/device/device_ops.h"
#include "kernels/linear/matmul.h"
#include "kernels/rowwise/embedding.h"
#include "kernels/rowwise/norm.h"
#include "kernels/rowwise/rope.h"
#include "kernels/rowwise/silu_mul.h"
#include "kernels/sampling/log_softmax.h"
#include "kernels/sampling/sample.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Valid for the whole process.
DeviceOps Ops();

// Each in <op>_cuda.cu beside the op.
void CountTokensCuda(const CountTokensArgs& args, Launcher& launcher);
void EmbeddingCuda(const EmbeddingArgs& args, Launcher& launcher);
void LogSoftmaxCuda(const LogSoftmaxArgs& args, Launcher& launcher);
void MatmulCuda(const MatmulArgs& args, float* scratch, Launcher& launcher);
void NormCuda(const NormArgs& args, Launcher& launcher);
void RopeCuda(const RopeArgs& args, float* scratch, Launcher& launcher);
void SampleCuda(const SampleArgs& args, void* scratch, Launcher& launcher);
void SiluMulCuda(const SiluMulArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
