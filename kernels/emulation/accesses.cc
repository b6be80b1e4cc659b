// Checks that an access is inside an allocation, and counts what it costs:
// sectors of global memory, or passes through the banks of shared memory.
#include <cstdio>

#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {
namespace {

constexpr uint64_t kSectorBytes = 32;
constexpr uint64_t kBankBytes = 4;
constexpr uint32_t kBanks = 32;

// Returns the number of distinct values; reorders `values`.
uint32_t CountDifferent(uint64_t* values, uint32_t count) {
  uint32_t different = 0;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t j = 0;
    while (j < different && values[j] != values[i]) ++j;
    if (j == different) values[different++] = values[i];
  }
  return different;
}

void CountGlobal(const Request& request, AccessTable::Entry& entry) {
  uint64_t sectors[kLanes];
  uint32_t count = 0;
  uint64_t bytes = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if ((request.mask >> lane & 1) == 0) continue;
    bytes += request.bytes;
    // An access is aligned and has at most 16 bytes, so it lies in one sector.
    sectors[count++] = request.addresses[lane] / kSectorBytes;
  }
  entry.sectors += CountDifferent(sectors, count);
  entry.least_sectors +=
      static_cast<int64_t>((bytes + kSectorBytes - 1) / kSectorBytes);
}

// The banks serve 32 lanes at a time if each accesses up to 4 bytes, 16 lanes
// if each accesses 8 bytes, and 8 lanes if each accesses 16 bytes. Lanes that
// access the same word of a bank share one pass.
void CountShared(const Request& request, AccessTable::Entry& entry) {
  const uint32_t words = request.bytes <= 4 ? 1 : request.bytes / 4;
  const uint32_t together = kLanes / words;
  for (uint32_t first = 0; first < kLanes; first += together) {
    uint32_t passes = 0;
    for (uint32_t bank = 0; bank < kBanks; ++bank) {
      uint64_t wanted[kLanes];
      uint32_t count = 0;
      for (uint32_t lane = first; lane < first + together; ++lane) {
        if ((request.mask >> lane & 1) == 0) continue;
        for (uint32_t w = 0; w < words; ++w) {
          const uint64_t word = request.addresses[lane] / kBankBytes + w;
          if (word % kBanks == bank) wanted[count++] = word;
        }
      }
      const uint32_t different = CountDifferent(wanted, count);
      passes = different > passes ? different : passes;
    }
    entry.passes += passes;
    entry.least_passes += passes > 0 ? 1 : 0;
  }
}

}  // namespace

void FlushRequests(Cta& cta, uint32_t warp) {
  AccessTable* const table = current_launch->accesses;
  if (table == nullptr) return;
  RawArray<OpenRequests>& open = cta.warps[warp].open;
  for (size_t i = 0; i < open.size(); ++i) {
    AccessTable::Entry& entry = table->entries[i];
    for (size_t n = 0; n < open[i].requests.size(); ++n) {
      const Request& request = open[i].requests[n];
      ++entry.requests;
      entry.bytes += int64_t{request.bytes} * __builtin_popcount(request.mask);
      if (entry.shared) {
        CountShared(request, entry);
      } else {
        CountGlobal(request, entry);
      }
    }
    open[i].requests.Clear();
    for (uint32_t& count : open[i].count) count = 0;
  }
}

void CountIn(AccessTable& table, const void* address, size_t bytes, bool shared,
             bool stores) {
  const Fiber& self = *current_fiber;
  int i = 0;
  while (i < table.count && !(table.entries[i].site.line == self.site.line &&
                              table.entries[i].site.file == self.site.file &&
                              table.entries[i].shared == shared &&
                              table.entries[i].stores == stores)) {
    ++i;
  }
  if (i == AccessTable::kMost) {
    Fault("the kernel has more than %d lines that access memory", i);
  }
  if (i == table.count) {
    AccessTable::Entry& entry = table.entries[table.count++];
    entry.site = self.site;
    entry.shared = shared;
    entry.stores = stores;
  }
  RawArray<OpenRequests>& open =
      self.cta->warps[self.place.thread / kLanes].open;
  const auto site = static_cast<size_t>(i);
  if (open.size() <= site) open.Resize(site + 1);
  OpenRequests& here = open[site];
  const uint32_t lane = self.place.thread % kLanes;
  const uint32_t n = here.count[lane]++;
  if (here.requests.size() <= n) {
    here.requests.Push({0, static_cast<uint32_t>(bytes), {}});
  }
  Request& request = here.requests[n];
  request.mask |= 1u << lane;
  request.addresses[lane] = reinterpret_cast<uint64_t>(address);
}

void FaultMisaligned(const void* address, size_t bytes) {
  Fault(
      "misaligned: address %p of an access of %zu bytes is not a multiple of "
      "its size",
      address, bytes);
}

void FaultOutOfShared(const void* address) {
  const Cta& cta = *current_fiber->cta;
  Fault(
      "out of bounds: byte %lld of shared memory, of which the CTA has %u "
      "bytes",
      static_cast<long long>(static_cast<const char*>(address) - cta.shared),
      cta.shared_bytes);
}

size_t FindRange(const void* address, size_t bytes) {
  const Launch& launch = *current_launch;
  const auto* const begin = static_cast<const char*>(address);
  // Binary search for the first range that begins after `begin`.
  size_t low = 0, high = launch.num_ranges;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (launch.ranges[middle].begin <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || !Holds(launch.ranges[low - 1], address, bytes)) {
    const bool near = low > 0 && begin < launch.ranges[low - 1].end + 4096;
    if (near) {
      const GuardedMemory::Range& range = launch.ranges[low - 1];
      Fault("out of bounds: byte %lld of an allocation of %lld bytes",
            static_cast<long long>(begin - range.begin),
            static_cast<long long>(range.end - range.begin));
    }
    Fault("%p is not in the device's memory", address);
  }
  return low - 1;
}

namespace {

// Returns the entry of the given block in the hash table. If the block has no
// entry, returns the free entry where it would be inserted.
StoredBlock& StoredAt(RawArray<StoredBlock>& table, uint32_t launch,
                      uint64_t block) {
  const size_t mask = table.size() - 1;
  size_t at = static_cast<size_t>(block * 0x9e3779b97f4a7c15u >> 20) & mask;
  while (table[at].launch == launch && table[at].block != block) {
    at = (at + 1) & mask;
  }
  return table[at];
}

uint32_t BytesOfBlock(uint64_t address, size_t bytes) {
  return ((1u << bytes) - 1) << address % StoredBlock::kBytes;
}

}  // namespace

void NoteStore(const void* address, size_t bytes) {
  FiberPool& pool = *current_launch->pool;
  RawArray<StoredBlock>& table = pool.stored;
  if (2 * (pool.num_stored + 1) > table.size()) {
    RawArray<StoredBlock> before;
    before.Swap(table);
    table.Resize(before.size() == 0 ? 1024 : 2 * before.size());
    for (size_t i = 0; i < before.size(); ++i) {
      const StoredBlock& entry = before[i];
      if (entry.launch != pool.launches) continue;
      StoredAt(table, entry.launch, entry.block) = entry;
    }
    before.Free();
  }
  const auto at = reinterpret_cast<uint64_t>(address);
  const uint64_t block = at / StoredBlock::kBytes;
  StoredBlock& entry = StoredAt(table, pool.launches, block);
  if (entry.launch != pool.launches) {
    entry = {block, pool.launches, 0};
    ++pool.num_stored;
  }
  entry.stored |= BytesOfBlock(at, bytes);
}

void CheckOnce(const void* address, size_t bytes, Site site) {
  Enter("LoadOnce", site);
  CheckAligned(address, bytes);
  CheckGlobalRange(address, bytes);
  CountAccess(address, bytes, /*shared=*/false, /*stores=*/false);
  FiberPool& pool = *current_launch->pool;
  if (pool.num_stored == 0) return;
  const auto at = reinterpret_cast<uint64_t>(address);
  const StoredBlock& entry =
      StoredAt(pool.stored, pool.launches, at / StoredBlock::kBytes);
  if (entry.launch == pool.launches &&
      (entry.stored & BytesOfBlock(at, bytes)) != 0) {
    Fault("this launch has stored to %p, so LoadOnce must not read it",
          address);
  }
}

void CheckGlobal(const void* address, size_t bytes, bool stores, Site site) {
  Enter(stores ? "StoreGlobal" : "LoadGlobal", site);
  CheckAligned(address, bytes);
  CheckGlobalRange(address, bytes);
  CountAccess(address, bytes, /*shared=*/false, stores);
  if (stores) NoteStore(address, bytes);
}

void CheckShared(const void* address, size_t bytes, bool stores, Site site) {
  Enter(stores ? "StoreShared" : "LoadShared", site);
  CheckAligned(address, bytes);
  CheckSharedRange(address, bytes);
  CountAccess(address, bytes, /*shared=*/true, stores);
}

const char* DescribeAddress(const void* address, char* text, size_t bytes) {
  const Launch& launch = *current_launch;
  const auto* const at = static_cast<const char*>(address);
  for (uint32_t c = 0; c < launch.num_ctas; ++c) {
    const Cta& cta = launch.ctas[c];
    if (at >= cta.shared_map && at < cta.shared_map + cta.shared_map_bytes) {
      std::snprintf(text, bytes,
                    "out of bounds: byte %lld of %u bytes of shared memory",
                    static_cast<long long>(at - cta.shared), cta.shared_bytes);
      return text;
    }
    for (uint32_t t = 0; t < cta.threads; ++t) {
      const char* const stack = cta.fibers[t].stack;
      if (at < stack && at >= stack - 4096) {
        return "the emulated thread's stack is full";
      }
    }
  }
  std::snprintf(text, bytes, "%p is not in the device's memory", address);
  return text;
}

}  // namespace kvasir::kernels::emulation
