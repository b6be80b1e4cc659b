// Atomics and fences, and how they order accesses.
//
// ThreadSanitizer knows neither fences nor the scopes of atomics, so it sees
// all atomics as relaxed. This file reports the order of atomics to it by means
// of clocks. A fence or release stores a snapshot of the thread under a fresh
// clock (Tag). Later atomics of this thread attach the tag to the addresses
// that they write.
//
// A thread that reads such an address by an atomic acquires the clock at its
// next fence or acquire. The scope of the writer's fence or release must
// include the reader's thread, and that of the reader's fence or acquire the
// writer's. As in PTX, a fence orders only the atomics of its own thread.
#include "kernels/emulation/runtime.h"

namespace kvasir::kernels::emulation {

namespace {

constexpr size_t kChunk = Launch::kLocationChunk;
constexpr uint64_t kNobody = ~uint64_t{0};

size_t HashOf(const void* address) {
  auto bits = reinterpret_cast<uint64_t>(address);
  bits *= 0x9e3779b97f4a7c15u;
  return static_cast<size_t>(bits >> 20);
}

void Insert(RawArray<Location*>& table, Location* location) {
  size_t at = HashOf(location->address) % table.size();
  while (table[at] != nullptr) at = (at + 1) % table.size();
  table[at] = location;
}

bool Reaches(const Tag& tag, bool gpu) {
  return (tag.gpu && gpu) || tag.cta == current_fiber->cta->index;
}

// Adds a tag, and removes an earlier tag of the same thread and scope: the
// later clock includes the earlier one.
void AddTag(RawArray<Tag>& tags, const Tag& tag) {
  for (size_t i = 0; i < tags.size(); ++i) {
    if (tags[i].by == tag.by && tags[i].gpu == tag.gpu) {
      tags[i] = tag;
      return;
    }
  }
  tags.Push(tag);
}

// Takes a snapshot of the current thread. Without ThreadSanitizer the tag is
// empty, because nothing else uses tags.
Tag NewTag(bool gpu) {
  if (!tsan::kOn) return {};
  const Tag tag = {FreshClock(), gpu, current_fiber->cta->index, current_fiber};
  tsan::Release(tag.clock);
  return tag;
}

// Collects the tags of `location` for the current thread, which reads the
// location by an atomic.
void ReadTags(Location& location, bool acquires) {
  for (size_t i = 0; i < location.tags.size(); ++i) {
    const Tag& tag = location.tags[i];
    if (acquires) {
      if (Reaches(tag, /*gpu=*/true)) tsan::Acquire(tag.clock);
    } else {
      AddTag(current_fiber->read, tag);
    }
  }
}

// Attaches the tag `released` to `location`, which the current thread writes by
// an atomic. If `goes_on`, the atomic is a read-modify-write, and earlier tags
// stay attached. Otherwise it is a store, and earlier tags are removed.
void WriteTags(Location& location, const Tag& released, bool goes_on) {
  NoteStore(location.address, location.bytes);
  if (!goes_on) location.tags.Clear();
  if (released.clock != nullptr) AddTag(location.tags, released);
}

// Reports a fault if an atomic with CTA scope accesses an address that atomics
// of another CTA also access.
void CheckScope(Location& location, bool gpu) {
  const uint64_t cta = current_fiber->cta->index;
  if (location.cta == kNobody) location.cta = cta;
  if (!gpu) location.cta_scoped = true;
  if (location.cta_scoped && location.cta != cta) {
    Fault(
        "an atomic with the scope of its CTA accesses an address that atomics "
        "of CTA %llu access, too",
        static_cast<unsigned long long>(location.cta));
  }
}

void SomeYield() {
  if (RandomBelow(4) == 0) Yield();
}

}  // namespace

void* FreshClock() {
  Launch& launch = *current_launch;
  // A launch with more than kMostClocks snapshots reuses clocks. A reused clock
  // can hide a race but cannot cause a false report.
  return launch.pool->clocks + 8 * (launch.num_clocks++ % Launch::kMostClocks);
}

bool InShared(const void* address) {
  const Cta& cta = *current_fiber->cta;
  const auto* const at = static_cast<const char*>(address);
  return at >= cta.shared && at < cta.shared + cta.shared_bytes;
}

Location& LocationOf(const void* address) {
  Launch& launch = *current_launch;
  FiberPool& pool = *launch.pool;
  RawArray<Location*>& table = pool.locations;
  Location* found = nullptr;
  size_t at = HashOf(address) % table.size();
  while (table[at] != nullptr && found == nullptr) {
    if (table[at]->address == address) found = table[at];
    at = (at + 1) % table.size();
  }
  const uint64_t cta = current_fiber->cta->index;
  if (found != nullptr) {
    // The CTA that owned this shared memory has ended.
    if (InShared(address) && found->cta != cta) {
      found->cta = cta;
      found->cta_scoped = false;
      found->tags.Clear();
    }
    return *found;
  }
  if (2 * (launch.num_locations + 1) > table.size()) {
    const size_t before = table.size();
    table.Free();
    table.Resize(2 * before);
    for (size_t i = 0; i < launch.num_locations; ++i) {
      Insert(table, pool.location_chunks[i / kChunk] + i % kChunk);
    }
  }
  if (launch.num_locations == kChunk * pool.location_chunks.size()) {
    pool.location_chunks.Push(
        static_cast<Location*>(MapPages(kChunk * sizeof(Location))));
  }
  Location* const fresh = pool.location_chunks[launch.num_locations / kChunk] +
                          launch.num_locations % kChunk;
  fresh->address = const_cast<void*>(address);
  fresh->cta = InShared(address) ? cta : kNobody;
  fresh->cta_scoped = false;
  fresh->tags.Clear();
  Insert(table, fresh);
  ++launch.num_locations;
  return *fresh;
}

void Fence(bool gpu, Site site) {
  Enter(gpu ? "Fence<kGpu>" : "Fence<kCta>", site);
  if (LeftOut()) return;
  Fiber& self = *current_fiber;
  for (size_t i = self.read.size(); i-- > 0;) {
    if (!Reaches(self.read[i], gpu)) continue;
    tsan::Acquire(self.read[i].clock);
    self.read.Take(i);
  }
  self.released = NewTag(gpu);
}

namespace {

Location& BeginAtomic(const char* doing, const void* at, size_t bytes,
                      Site site) {
  Enter(doing, site);
  CheckAligned(at, bytes);
  if (InShared(at)) {
    CheckSharedRange(at, bytes);
  } else {
    CheckGlobalRange(at, bytes);
  }
  Location& location = LocationOf(at);
  location.bytes = bytes;
  return location;
}

template <typename T>
T LoadAtomic(const void* from, bool acquires, Site site) {
  Location& location = BeginAtomic(
      acquires ? "LoadAtomic<kAcquire>" : "LoadAtomic", from, sizeof(T), site);
  CheckScope(location, /*gpu=*/true);
  if (acquires && LeftOut()) acquires = false;
  Poll(from, *static_cast<const volatile T*>(from));
  T value;
  if constexpr (sizeof(T) == 8) {
    value = tsan::Load64(from);
  } else {
    value = tsan::Load32(from);
  }
  ReadTags(location, acquires);
  return value;
}

template <typename T>
void StoreAtomic(void* to, T value, bool releases, Site site) {
  Location& location = BeginAtomic(
      releases ? "StoreAtomic<kRelease>" : "StoreAtomic", to, sizeof(T), site);
  CheckScope(location, /*gpu=*/true);
  if (releases && LeftOut()) releases = false;
  SomeYield();
  WriteTags(location, releases ? NewTag(/*gpu=*/true) : current_fiber->released,
            /*goes_on=*/false);
  if constexpr (sizeof(T) == 8) {
    tsan::Store64(to, value);
  } else {
    tsan::Store32(to, value);
  }
  Progress();
}

float AsFloat(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
uint32_t AsBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

uint32_t Apply(AtomicKind kind, uint32_t old, uint32_t value,
               uint32_t expected) {
  switch (kind) {
    case AtomicKind::kAdd:
      return old + value;
    case AtomicKind::kAddFloat:
      return AsBits(AsFloat(old) + AsFloat(value));
    case AtomicKind::kMax:
      return static_cast<int32_t>(value) > static_cast<int32_t>(old) ? value
                                                                     : old;
    case AtomicKind::kCas:
      break;
  }
  return old == expected ? value : old;
}

}  // namespace

uint32_t LoadAtomic32(const void* from, bool acquires, Site site) {
  return LoadAtomic<uint32_t>(from, acquires, site);
}
uint64_t LoadAtomic64(const void* from, bool acquires, Site site) {
  return LoadAtomic<uint64_t>(from, acquires, site);
}
void StoreAtomic32(void* to, uint32_t value, bool releases, Site site) {
  StoreAtomic<uint32_t>(to, value, releases, site);
}
void StoreAtomic64(void* to, uint64_t value, bool releases, Site site) {
  StoreAtomic<uint64_t>(to, value, releases, site);
}

uint32_t Atomic(AtomicKind kind, void* at, uint32_t value, uint32_t expected,
                bool gpu, Site site) {
  static constexpr const char* kNames[] = {"AtomicAdd", "AtomicAdd",
                                           "AtomicMax", "AtomicCas"};
  Location& location =
      BeginAtomic(kNames[static_cast<int>(kind)], at, sizeof(value), site);
  CheckScope(location, gpu || InShared(at));
  SomeYield();
  ReadTags(location, /*acquires=*/false);
  const uint32_t old = *static_cast<const volatile uint32_t*>(at);
  const uint32_t now = Apply(kind, old, value, expected);
  tsan::Exchange32(at, now);
  if (kind != AtomicKind::kCas || old == expected) {
    WriteTags(location, current_fiber->released, /*goes_on=*/true);
  }
  if (now != old) {
    Progress();
  } else if (kind == AtomicKind::kCas ||
             (kind == AtomicKind::kAdd && value == 0)) {
    // The atomic changed nothing, so the thread may be polling with it.
    Poll(at, old);
  }
  return old;
}

uint64_t AtomicAdd64(void* at, uint64_t value, bool gpu, Site site) {
  Location& location = BeginAtomic("AtomicAdd", at, sizeof(value), site);
  CheckScope(location, gpu || InShared(at));
  SomeYield();
  ReadTags(location, /*acquires=*/false);
  const uint64_t old = *static_cast<const volatile uint64_t*>(at);
  tsan::Exchange64(at, old + value);
  WriteTags(location, current_fiber->released, /*goes_on=*/true);
  Progress();
  return old;
}

}  // namespace kvasir::kernels::emulation
