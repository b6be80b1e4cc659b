// Measures the matmul op, and compares it with other speeds of the same run:
//  - Decode: with 1 row, the bytes of weights per second are compared with the
//    machine's read bandwidth. The speed with 8 rows is compared with 1 row.
//  - Prefill: with 512 rows, the speed is compared with oneDNN's float32 GEMM.
// The shapes are those of a Llama with 1.1 billion parameters.
//
// The grouped products of a mixture of experts are also compared:
//  - Decode: the bytes per second of the weights of the experts that the token
//    uses are compared with the read bandwidth.
//  - Prefill: the speed is compared with one dense product of as many
//    operations. Experts get different numbers of rows, as from a router.
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

// The experts of one layer.
struct ExpertsShape {
  const char* name;
  int64_t experts;
  int64_t top_k;
  int64_t hidden;
  int64_t features;
};
constexpr ExpertsShape kExperts[] = {{"2_of_8_experts", 8, 2, 2048, 2816},
                                     {"8_of_64_experts", 64, 8, 2048, 768}};

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
    // The 4096 bytes more are for grouped products, which need a few numbers
    // for each expert.
    workspace_memory_ =
        Memory(static_cast<int64_t>(counter.peak_bytes()) + 4096);
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
    for (const ExpertsShape& shape : kExperts) Experts(shape, &result);
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

  // The weights of one projection of all experts.
  PackedMatrix ExpertWeights(int64_t experts, int64_t k, int64_t n,
                             DeviceBuffer* buffer) {
    PackedMatrix weight;
    weight.k = k;
    weight.n = n;
    weight.dtype = kernels::DType::kBf16;
    *buffer = Memory(experts * weight.bytes());
    uint16_t* const out = buffer->as<uint16_t>().device_address();
    for (int64_t i = 0; i < experts * weight.bytes() / 2; ++i) {
      out[i] = static_cast<uint16_t>(0x3f80 + i % 97);
    }
    weight.data = buffer->data();
    return weight;
  }

  void MultiplyGroups(const PackedMatrix& weight, const DeviceBuffer& x,
                      const DeviceBuffer& y,
                      const std::vector<int32_t>& first_rows) {
    kernels::GroupedMatmulParams params;
    params.x = x.as<float>();
    params.x_row_stride = weight.k;
    params.num_rows = first_rows.back();
    params.first_rows = kernels::DevicePtr<const int32_t>(first_rows.data());
    params.num_groups = static_cast<int64_t>(first_rows.size()) - 1;
    params.weight = weight;
    params.y = y.as<float>();
    params.y_row_stride = weight.n;
    kernels::Workspace workspace(workspace_memory_.data(),
                                 workspace_memory_.bytes());
    KVASIR_CHECK(kernels::GroupedMatmul(*stream_, params, workspace).ok());
  }

  // Returns the index of each expert's first row, followed by the total number
  // of rows. `rows` has the number of rows of each expert.
  static std::vector<int32_t> FirstRows(const std::vector<int32_t>& rows) {
    std::vector<int32_t> first = {0};
    for (const int32_t more : rows) first.push_back(first.back() + more);
    return first;
  }

  void Experts(const ExpertsShape& shape, nlohmann::json* result) {
    DeviceBuffer memory[2];
    const PackedMatrix gate_up = ExpertWeights(shape.experts, shape.hidden,
                                               2 * shape.features, &memory[0]);
    const PackedMatrix down =
        ExpertWeights(shape.experts, shape.features, shape.hidden, &memory[1]);
    const int64_t rows = kPrefillRows * shape.top_k;
    const DeviceBuffer x = Numbers(rows * shape.hidden);
    const DeviceBuffer y = Numbers(rows * 2 * shape.features);
    // Each token uses the next top_k experts, so that together the tokens use
    // each expert once.
    std::vector<std::vector<int32_t>> tokens;
    for (int64_t first = 0; first < shape.experts; first += shape.top_k) {
      std::vector<int32_t> sizes(static_cast<size_t>(shape.experts), 0);
      std::fill_n(sizes.begin() + first, shape.top_k, 1);
      tokens.push_back(FirstRows(sizes));
    }
    // Like a router, this loads the experts unevenly: expert e gets about e + 1
    // of `parts` parts of the rows.
    std::vector<int32_t> sizes(static_cast<size_t>(shape.experts), 0);
    const int64_t parts = shape.experts * (shape.experts + 1) / 2;
    int64_t left = rows;
    for (int64_t e = 0; e < shape.experts; ++e) {
      const int64_t part =
          e + 1 == shape.experts ? left : rows * (e + 1) / parts;
      sizes[static_cast<size_t>(e)] = static_cast<int32_t>(part);
      left -= part;
    }
    const std::vector<int32_t> prompt = FirstRows(sizes);
    const auto dense = [&](const PackedMatrix& weight, const DeviceBuffer& from,
                           const DeviceBuffer& to) {
      MatmulParams params;
      params.x = from.as<float>();
      params.x_row_stride = weight.k;
      params.num_rows = rows;
      params.weight = weight;
      params.y = to.as<float>();
      params.y_row_stride = weight.n;
      kernels::Workspace workspace(workspace_memory_.data(),
                                   workspace_memory_.bytes());
      KVASIR_CHECK(kernels::Matmul(*stream_, params, workspace).ok());
    };
    const double token_bytes =
        static_cast<double>(shape.experts * (gate_up.bytes() + down.bytes()));
    std::vector<double> read, decode, whole, grouped;
    for (int i = 0; i < kPairs; ++i) {
      read.push_back(1.0 / probe_->BytesPerSecond());
      decode.push_back(SecondsOf([&] {
                         for (const auto& token : tokens) {
                           MultiplyGroups(gate_up, x, y, token);
                           MultiplyGroups(down, y, x, token);
                         }
                       }) /
                       token_bytes);
      whole.push_back(SecondsOf([&] {
        dense(gate_up, x, y);
        dense(down, y, x);
      }));
      grouped.push_back(SecondsOf([&] {
        MultiplyGroups(gate_up, x, y, prompt);
        MultiplyGroups(down, y, x, prompt);
      }));
    }
    const std::string name = shape.name;
    Report(name + "_read_bandwidth_share", RatioOf(read, decode), 1.0, result);
    Report(name + "_share_of_dense", RatioOf(whole, grouped), 1.0, result);
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
