// The ops of a GPU's back end. C++17 and free of Abseil. An op is one line here
// and one in op_table.cu.
#pragma once

#include "kernels/device/device_ops.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/latents/hadamard.h"
#include "kernels/latents/kv_append.h"
#include "kernels/latents/lift.h"
#include "kernels/rowwise/embedding.h"
#include "kernels/rowwise/norm.h"
#include "kernels/rowwise/rope.h"
#include "kernels/rowwise/silu_mul.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Valid for the whole process.
DeviceOps Ops();

// Each in <op>_cuda.cu beside the op.
void ComplexLiftCuda(const ComplexLiftArgs& args, Launcher& launcher);
void CopyPagesCuda(const CopyPagesArgs& args, Launcher& launcher);
void EmbeddingCuda(const EmbeddingArgs& args, Launcher& launcher);
void HadamardCuda(const HadamardArgs& args, float* scratch, Launcher& launcher);
void KvAppendCuda(const KvAppendArgs& args, float* scratch, Launcher& launcher);
void LiftCuda(const LiftArgs& args, float* scratch, Launcher& launcher);
void NormCuda(const NormArgs& args, Launcher& launcher);
void RopeCuda(const RopeArgs& args, float* scratch, Launcher& launcher);
void SiluMulCuda(const SiluMulArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
