#include "server/runtime/device_metrics.h"

#include <string>
#include <utility>

namespace kvasir::cli {
namespace {

prometheus::ClientMetric Value(int64_t value) {
  prometheus::ClientMetric metric;
  metric.gauge.value = static_cast<double>(value);
  return metric;
}

prometheus::MetricFamily Gauge(const char* name, const char* help) {
  return {name, help, prometheus::MetricType::Gauge, {}};
}

}  // namespace

void DeviceMetrics::Stop() {
  base::MutexLock lock(&mutex_);
  device_ = nullptr;
}

std::vector<prometheus::MetricFamily> DeviceMetrics::Collect() const {
  base::MutexLock lock(&mutex_);
  std::vector<prometheus::MetricFamily> families;
  if (device_ == nullptr) return families;
  families.push_back(
      Gauge("kvasir_staging_bytes",
            "Bytes of host memory for copies to and from a GPU"));
  families.back().metric.push_back(Value(device_->staging_bytes()));
  const auto memory = device_->memory();
  if (!memory.ok()) return families;
  prometheus::MetricFamily bytes =
      Gauge("kvasir_device_memory_bytes",
            "Bytes of the device's memory by kind: what is allocated, what is "
            "taken outside of that, and what is free");
  const auto add = [&bytes](std::string kind, int64_t value) {
    prometheus::ClientMetric metric = Value(value);
    metric.label = {{"kind", std::move(kind)}};
    bytes.metric.push_back(std::move(metric));
  };
  const kernels::DeviceAllocator& allocator = device_->allocator();
  for (int i = 0; i < kernels::kNumMemoryTags; ++i) {
    const auto tag = static_cast<kernels::MemoryTag>(i);
    const bool elsewhere = tag == kernels::MemoryTag::kHostPool &&
                           allocator.host_pool() == kernels::HostPool::kOnHost;
    add(kernels::MemoryTagName(tag), elsewhere ? 0 : allocator.use(tag).bytes);
  }
  add("outside", memory->other_bytes);
  add("free", memory->free_bytes);
  families.push_back(std::move(bytes));
  families.push_back(
      Gauge("kvasir_device_memory_limit_bytes",
            "The most bytes of the device's memory that may be in use"));
  families.back().metric.push_back(Value(
      static_cast<int64_t>(share_ * static_cast<double>(memory->total_bytes))));
  return families;
}

}  // namespace kvasir::cli
