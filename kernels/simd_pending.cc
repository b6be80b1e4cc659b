#include "kernels/ops.h"

namespace kvasir::kernels {

void EmbeddingSimd(const EmbeddingParams& p, CpuStream& s) {
  EmbeddingReference(p, s);
}
void RmsNormSimd(const RmsNormParams& p, CpuStream& s) {
  RmsNormReference(p, s);
}
void RopeSimd(const RopeParams& p, float* scratch, CpuStream& s) {
  RopeReference(p, scratch, s);
}
void SiluMulSimd(const SiluMulParams& p, CpuStream& s) {
  SiluMulReference(p, s);
}
void AddRowsSimd(const AddRowsParams& p, CpuStream& s) {
  AddRowsReference(p, s);
}
void GatherRowsSimd(const GatherRowsParams& p, CpuStream& s) {
  GatherRowsReference(p, s);
}
void KvAppendSimd(const KvAppendParams& p, CpuStream& s) {
  KvAppendReference(p, s);
}
void LogSoftmaxSimd(const LogSoftmaxParams& p, CpuStream& s) {
  LogSoftmaxReference(p, s);
}
void SampleSimd(const SampleParams& p, void* scratch, CpuStream& s) {
  SampleReference(p, scratch, s);
}

}  // namespace kvasir::kernels
