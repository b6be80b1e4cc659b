// Compares the speed of the matmul op, in the same run, with
//  - for decode: the machine's read bandwidth (bytes of weights per second with
//    1 row), and the speed with 8 rows;
//  - for prefill: oneDNN's float32 GEMM on the same shapes, with 512 rows.
// The shapes are those of a Llama with 1.1 billion parameters.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/machine.h"
#include "base/thread_pool.h"
#include "bench/ceilings.h"
#include "bench/gemm_baseline.h"
#include "bench/gemm_share.h"
#include "bench/paired.h"
#include "kernels/device/allocator.h"
#include "kernels/linear/ops.h"
#include "nlohmann/json.hpp"

namespace kvasir::bench {
namespace {

using kernels::DeviceBuffer;
using kernels::MatmulParams;
using kernels::MemoryTag;
using kernels::PackedMatrix;

constexpr int kPairs = 9;
constexpr int64_t kPrefillRows = 512;

const GemmShape kLayer[] = {{"qkv", 2048, 2560},
                            {"o", 2048, 2048},
                            {"gate_up", 2048, 11264},
                            {"down", 5632, 2048}};

class MatmulBench {
 public:
  MatmulBench()
      : machine_(base::ReadMachineLimits()),
        pool_(machine_.cpus),
        device_(&pool_),
        stream_(device_.MakeStream()),
        footprint_bytes_(
            4 * std::max(base::LastLevelCacheBytes(), int64_t{64} << 20)),
        probe_(*kernels::ReadBandwidthProbe::Create(&pool_, footprint_bytes_)) {
    int64_t bytes = 0;
    while (bytes < footprint_bytes_) {
      for (const GemmShape& shape : kLayer) bytes += AddWeight(shape);
    }
    x_ = Numbers(kPrefillRows * 5632);
    y_ = Numbers(kPrefillRows * 11264);
    MatmulParams params;
    params.num_rows = kPrefillRows;
    params.x_row_stride = 5632;
    params.y_row_stride = 11264;
    params.weight = weights_.front();
    kernels::Workspace counter = kernels::Workspace::Counting();
    KVASIR_CHECK(kernels::Matmul(*stream_, params, counter).ok());
    workspace_memory_ = Memory(static_cast<int64_t>(counter.peak_bytes()) + 64);
  }

  nlohmann::json Run() {
    nlohmann::json result;
    result["machine"] = {
        {"cpu", base::CpuModelName()},
        {"instructions", kernels::CpuTargetName()},
        {"threads", pool_.num_threads()},
        {"footprint_bytes", footprint_bytes_},
    };
    Decode(&result);
    if (HasGemmBaseline()) Prefill(&result);
    return result;
  }

 private:
  DeviceBuffer Memory(int64_t bytes) {
    auto buffer = device_.allocator().Allocate(
        static_cast<size_t>(bytes), MemoryTag::kOther, {.prefault = true});
    KVASIR_CHECK(buffer.ok());
    return *std::move(buffer);
  }

  // Makes a buffer of numbers near one, so that there are no subnormal numbers
  // and no overflow.
  DeviceBuffer Numbers(int64_t count) {
    DeviceBuffer buffer = Memory(count * 4);
    float* const out = buffer.as<float>().device_address();
    for (int64_t i = 0; i < count; ++i) {
      out[i] = 1.0f + 1e-3f * static_cast<float>(i % 97);
    }
    return buffer;
  }

  int64_t AddWeight(const GemmShape& shape) {
    PackedMatrix weight;
    weight.k = shape.k;
    weight.n = shape.n;
    weight.dtype = kernels::DType::kBf16;
    DeviceBuffer buffer = Memory(weight.bytes());
    uint16_t* const out = buffer.as<uint16_t>().device_address();
    for (int64_t i = 0; i < weight.bytes() / 2; ++i) {
      out[i] = static_cast<uint16_t>(0x3f80 + i % 97);
    }
    weight.data = buffer.data();
    memory_.push_back(std::move(buffer));
    weights_.push_back(weight);
    weight_bytes_ += weight.bytes();
    return weight.bytes();
  }

  void Multiply(const PackedMatrix& weight, int64_t rows) {
    MatmulParams params;
    params.x = x_.as<float>();
    params.x_row_stride = weight.k;
    params.num_rows = rows;
    params.weight = weight;
    params.y = y_.as<float>();
    params.y_row_stride = weight.n;
    kernels::Workspace workspace(workspace_memory_.data(),
                                 workspace_memory_.bytes());
    KVASIR_CHECK(kernels::Matmul(*stream_, params, workspace).ok());
  }

  void Decode(nlohmann::json* result) {
    std::vector<double> one, eight, read;
    for (int i = 0; i < kPairs; ++i) {
      // All three measurements are in seconds per byte.
      read.push_back(1.0 / probe_->BytesPerSecond());
      one.push_back(SecondsOf([&] {
                      for (const auto& weight : weights_) Multiply(weight, 1);
                    }) /
                    static_cast<double>(weight_bytes_));
      eight.push_back(SecondsOf([&] {
                        for (const auto& weight : weights_) Multiply(weight, 8);
                      }) /
                      static_cast<double>(weight_bytes_));
    }
    Report("read_bandwidth_share", RatioOf(read, one), 1.0, result);
    Report("batch8_speedup", RatioOf(one, eight), 8.0, result);
    (*result)["machine"]["read_bytes_per_second"] = 1.0 / Quantile(read, 0.5);
    (*result)["figures"]["decode_bytes_per_second"] = 1.0 / Quantile(one, 0.5);
  }

  void Prefill(nlohmann::json* result) {
    auto share = GemmShare::Create({std::begin(kLayer), std::end(kLayer)},
                                   {.num_rows = kPrefillRows}, &pool_);
    KVASIR_CHECK(share.ok());
    for (int i = 0; i < kPairs; ++i) KVASIR_CHECK(share->MeasurePair().ok());
    for (const GemmShareRow& row : share->Rows()) {
      (*result)["rows"].push_back({{"shape", row.shape.name},
                                   {"gflops", row.flops * 1e-9},
                                   {"onednn_gflops", row.baseline_flops * 1e-9},
                                   {"share", row.share.median},
                                   {"spread", row.share.spread}});
    }
    Report("gemm_share", RatioOf(share->baseline_seconds(), share->seconds()),
           1.0, result);
  }

  static void Report(const std::string& name, PairedRatio ratio, double factor,
                     nlohmann::json* result) {
    (*result)["figures"][name] = ratio.median * factor;
    (*result)["spread"][name] = ratio.spread;
    if (ratio.undecided()) (*result)["undecided"].push_back(name);
  }

  const base::MachineLimits machine_;
  base::ThreadPool pool_;
  kernels::CpuDevice device_;
  const std::unique_ptr<kernels::Stream> stream_;
  const int64_t footprint_bytes_;
  const std::unique_ptr<kernels::ReadBandwidthProbe> probe_;
  std::vector<DeviceBuffer> memory_;
  std::vector<PackedMatrix> weights_;
  int64_t weight_bytes_ = 0;
  DeviceBuffer x_;
  DeviceBuffer y_;
  DeviceBuffer workspace_memory_;
};

}  // namespace
}  // namespace kvasir::bench

int main() {
  kvasir::bench::MatmulBench bench;
  std::printf("%s\n", bench.Run().dump(2).c_str());
  return 0;
}
