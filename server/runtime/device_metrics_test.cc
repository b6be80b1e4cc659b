#include "server/runtime/device_metrics.h"

#include <gmock/gmock.h>

#include <map>
#include <string>

#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_runtime.h"

namespace kvasir::cli {
namespace {

using kernels::MemoryTag;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// Returns the values of all metrics. The key is the label `kind`, or the
// metric's name if it has no such label.
std::map<std::string, double> Values(const DeviceMetrics& metrics) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      values[metric.label.empty() ? family.name : metric.label[0].value] =
          metric.gauge.value;
    }
  }
  return values;
}

TEST(DeviceMetricsTest, TheUsedAndFreeMemoryOfAGpuIsReported) {
  kernels::cuda::FakeRuntime runtime;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto device,
                              kernels::CudaDevice::Make({}, &runtime, {}));
  auto& allocator = device->allocator();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto weights,
                              allocator.Allocate(1000, MemoryTag::kWeights));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto pages,
                              allocator.Allocate(3 << 20, MemoryTag::kKvCache));
  // The host pool is host memory, which does not count as device memory.
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto pool,
                              allocator.Allocate(5000, MemoryTag::kHostPool));
  const double mib = 1 << 20;
  DeviceMetrics metrics(device.get(), 0.5);
  EXPECT_THAT(Values(metrics),
              UnorderedElementsAre(
                  Pair("weights", 1000), Pair("kv_cache", 3 * mib),
                  Pair("workspace", 0), Pair("host_pool", 0), Pair("other", 0),
                  // FakeRuntime's context takes 100 MiB. The two allocations
                  // are rounded up to 2 MiB and 4 MiB.
                  Pair("outside", 100 * mib + 2 * mib - 1000 + mib),
                  Pair("free", 918 * mib),
                  Pair("kvasir_device_memory_limit_bytes", 512 * mib),
                  Pair("kvasir_staging_bytes", 0)));
  runtime.FailNext("MemoryInfo", static_cast<kernels::cuda::Result>(700));
  EXPECT_THAT(Values(metrics),
              UnorderedElementsAre(Pair("kvasir_staging_bytes", 0)));
  metrics.Stop();
  EXPECT_TRUE(metrics.Collect().empty());
}

TEST(DeviceMetricsTest, OnACpuTheMemoryOfTheMachineIsReported) {
  base::ThreadPool threads(1);
  kernels::CpuDevice device(&threads);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto weights,
      device.allocator().Allocate(1 << 20, MemoryTag::kWeights));
  DeviceMetrics metrics(&device, 1);
  auto values = Values(metrics);
  const double total = values["kvasir_device_memory_limit_bytes"];
  EXPECT_GT(total, 0);
  values.erase("kvasir_device_memory_limit_bytes");
  double sum = 0;
  for (const auto& [kind, bytes] : values) {
    EXPECT_GE(bytes, 0) << kind;
    sum += bytes;
  }
  EXPECT_EQ(sum, total);
  EXPECT_EQ(values["weights"], 1 << 20);
}

}  // namespace
}  // namespace kvasir::cli
