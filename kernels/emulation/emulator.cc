#include "kernels/emulation/emulator.h"

#include "base/check.h"
#include "kernels/emulation/tables.h"

namespace kvasir::kernels::emulation {
namespace {

std::string FileName(const char* path) {
  const std::string whole = path;
  return whole.substr(whole.rfind('/') + 1);
}

// A hash (splitmix64) that maps neighbouring seeds and launch numbers to very
// different random seeds. The result is never 0.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x == 0 ? 1 : x;
}

}  // namespace

struct Emulator::Kernel {
  SiteTable sites = {};
  AccessTable accesses = {};
  SyncSite left_out;
};

Emulator::Emulator(const EmulatorOptions& options, const GuardedMemory* memory)
    : options_(options), memory_(memory), pool_(TakeFiberPool()) {}

void FreeIdleStacks() { GiveFiberPool(nullptr); }

Emulator::~Emulator() { GiveFiberPool(pool_); }

Emulator::Kernel& Emulator::KernelOf(const std::string& name) {
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (kernel == nullptr) {
    kernel = std::make_unique<Kernel>();
    kernel->sites.out_index = -1;
  }
  return *kernel;
}

void Emulator::Run(const KernelLaunch& launch) {
  std::vector<GuardedMemory::Range> ranges;
  if (memory_ != nullptr) ranges = memory_->Live();
  base::MutexLock lock(&mutex_);
  Kernel& kernel = KernelOf(launch.name);
  ++launches_;
  const ThreadOrder order =
      options_.seed % 2 == 0 ? ThreadOrder::kByWarp : ThreadOrder::kAny;
  RunLaunch(*pool_, {&launch, &kernel.sites,
                     options_.count_accesses ? &kernel.accesses : nullptr,
                     ranges.data(), ranges.size(), memory_ == nullptr, order,
                     Mix(options_.seed + Mix(static_cast<uint64_t>(launches_))),
                     static_cast<uint32_t>(options_.multiprocessors),
                     static_cast<uint32_t>(options_.shared_bytes)});
}

std::vector<std::string> Emulator::Kernels() const {
  base::MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const auto& [name, kernel] : kernels_) names.push_back(name);
  return names;
}

std::vector<SyncSite> Emulator::SyncSites(const std::string& kernel) const {
  base::MutexLock lock(&mutex_);
  std::vector<SyncSite> sites;
  const auto found = kernels_.find(kernel);
  if (found == kernels_.end()) return sites;
  const SiteTable& table = found->second->sites;
  for (int i = 0; i < table.count; ++i) {
    const SiteTable::Entry& entry = table.entries[i];
    sites.push_back(
        {FileName(entry.site.file), entry.site.line, entry.kind, entry.passes});
  }
  return sites;
}

std::vector<AccessCount> Emulator::Accesses(const std::string& kernel) const {
  base::MutexLock lock(&mutex_);
  std::vector<AccessCount> counts;
  const auto found = kernels_.find(kernel);
  if (found == kernels_.end()) return counts;
  const AccessTable& table = found->second->accesses;
  for (int i = 0; i < table.count; ++i) {
    const AccessTable::Entry& entry = table.entries[i];
    counts.push_back({FileName(entry.site.file), entry.site.line,
                      std::string(entry.shared ? "shared " : "global ") +
                          (entry.stores ? "store" : "load"),
                      entry.requests, entry.bytes, entry.sectors,
                      entry.least_sectors, entry.passes, entry.least_passes});
  }
  return counts;
}

void Emulator::LeaveOut(const std::string& name, const SyncSite& site) {
  base::MutexLock lock(&mutex_);
  Kernel& kernel = KernelOf(name);
  KVASIR_CHECK(kernel.sites.count == 0);
  kernel.left_out = site;
  kernel.sites.out_file = kernel.left_out.file.c_str();
  kernel.sites.out_line = site.line;
  kernel.sites.out_kind = kernel.left_out.kind.c_str();
}

int64_t Emulator::launches() const {
  base::MutexLock lock(&mutex_);
  return launches_;
}

}  // namespace kvasir::kernels::emulation
