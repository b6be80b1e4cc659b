// The table of all ops that have a GPU kernel. C++17 and free of Abseil. An op
// has two lines here: the declaration of its function and its entry in the
// table. The folders that define ops never include this header, because it
// includes the headers of all of them. If a definition in a _cuda.cu differs
// from its declaration here, the program does not link.
#pragma once

#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/device_ops.h"
#include "kernels/eviction/evict_compact.h"
#include "kernels/eviction/evict_select.h"
#include "kernels/experts/mix_experts.h"
#include "kernels/experts/route.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/latents/hadamard.h"
#include "kernels/latents/key_bias.h"
#include "kernels/latents/kv_append.h"
#include "kernels/latents/lift.h"
#include "kernels/linear/grouped_matmul.h"
#include "kernels/linear/matmul.h"
#include "kernels/rowwise/activation.h"
#include "kernels/rowwise/embedding.h"
#include "kernels/rowwise/norm.h"
#include "kernels/rowwise/rope.h"
#include "kernels/rowwise/rows.h"
#include "kernels/rowwise/silu_mul.h"
#include "kernels/sampling/log_softmax.h"
#include "kernels/sampling/sample.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Each function is defined in <op>_cuda.cu, in the folder of its op.
void ActivationCuda(const ActivationArgs& args, Launcher& launcher);
void AddRowsCuda(const AddRowsArgs& args, Launcher& launcher);
void ComplexLiftCuda(const ComplexLiftArgs& args, Launcher& launcher);
void CopyPagesCuda(const CopyPagesArgs& args, Launcher& launcher);
void CountTokensCuda(const CountTokensArgs& args, Launcher& launcher);
void EmbeddingCuda(const EmbeddingArgs& args, Launcher& launcher);
void EvictCompactCuda(const EvictCompactArgs& args, Launcher& launcher);
void EvictSelectCuda(const EvictSelectArgs& args, uint64_t* scratch,
                     Launcher& launcher);
void GatherRowsCuda(const GatherRowsArgs& args, Launcher& launcher);
void GroupedMatmulCuda(const GroupedMatmulArgs& args, float* scratch,
                       int64_t* first_parts, Launcher& launcher);
void HadamardCuda(const HadamardArgs& args, float* scratch, Launcher& launcher);
void KeyBiasCuda(const KeyBiasArgs& args, Launcher& launcher);
void KvAppendCuda(const KvAppendArgs& args, float* scratch, Launcher& launcher);
void LiftCuda(const LiftArgs& args, float* scratch, Launcher& launcher);
void LogSoftmaxCuda(const LogSoftmaxArgs& args, Launcher& launcher);
void MatmulCuda(const MatmulArgs& args, float* scratch, Launcher& launcher);
void MixExpertsCuda(const MixExpertsArgs& args, Launcher& launcher);
void NormCuda(const NormArgs& args, Launcher& launcher);
void PagedAttentionCuda(const AttentionLaunchArgs& launch, float* scratch,
                        Launcher& launcher);
void RopeCuda(const RopeArgs& args, float* scratch, Launcher& launcher);
void RouteCuda(const RouteArgs& args, int32_t* scratch, Launcher& launcher);
void SampleCuda(const SampleArgs& args, void* scratch, Launcher& launcher);
void SiluMulCuda(const SiluMulArgs& args, Launcher& launcher);
void SumRowsCuda(const SumRowsArgs& args, Launcher& launcher);

// Returns the table, which is valid for the whole process.
inline DeviceOps Ops() {
  static const DeviceOp ops[] = {
      MakeDeviceOp<ActivationParams>("activation", &ActivationCuda),
      MakeDeviceOp<AddRowsParams>("add_rows", &AddRowsCuda),
      MakeDeviceOp<ComplexLiftParams>("complex_lift", &ComplexLiftCuda),
      MakeDeviceOp<CopyPagesParams>("copy_pages", &CopyPagesCuda),
      MakeDeviceOp<CountTokensParams>("count_tokens", &CountTokensCuda),
      MakeDeviceOp<EmbeddingParams>("embedding", &EmbeddingCuda),
      MakeDeviceOp<EvictCompactParams>("evict_compact", &EvictCompactCuda),
      MakeDeviceOp<EvictSelectParams, DevicePtr<uint64_t>>("evict_select",
                                                           &EvictSelectCuda),
      MakeDeviceOp<GatherRowsParams>("gather_rows", &GatherRowsCuda),
      MakeDeviceOp<GroupedMatmulParams, DevicePtr<float>, DevicePtr<int64_t>>(
          "grouped_matmul", &GroupedMatmulCuda),
      MakeDeviceOp<HadamardParams, DevicePtr<float>>("hadamard", &HadamardCuda),
      MakeDeviceOp<KeyBiasParams>("key_bias", &KeyBiasCuda),
      MakeDeviceOp<KvAppendParams, DevicePtr<float>>("kv_append",
                                                     &KvAppendCuda),
      MakeDeviceOp<LiftParams, DevicePtr<float>>("lift", &LiftCuda),
      MakeDeviceOp<LogSoftmaxParams>("log_softmax", &LogSoftmaxCuda),
      MakeDeviceOp<MatmulParams, DevicePtr<float>>("matmul", &MatmulCuda),
      MakeDeviceOp<MixExpertsParams>("mix_experts", &MixExpertsCuda),
      MakeDeviceOp<NormParams>("norm", &NormCuda),
      MakeDeviceOp<AttentionLaunch, DevicePtr<float>>("paged_attention",
                                                      &PagedAttentionCuda),
      MakeDeviceOp<RopeParams, DevicePtr<float>>("rope", &RopeCuda),
      MakeDeviceOp<RouteParams, DevicePtr<int32_t>>("route", &RouteCuda),
      MakeDeviceOp<SampleParams, DevicePtr<void>>("sample", &SampleCuda),
      MakeDeviceOp<SiluMulParams>("silu_mul", &SiluMulCuda),
      MakeDeviceOp<SumRowsParams>("sum_rows", &SumRowsCuda),
  };
  return {ops, sizeof(ops) / sizeof(ops[0])};
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
