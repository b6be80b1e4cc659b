// Loads, stores and atomics. Kernels may also access memory through plain
// pointers, but accesses by these functions are checked by the emulator
// (alignment, kind of memory) and counted (sectors, bank conflicts). C++17.
#pragma once

#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// In the functions from LoadGlobal to StoreShared, T is trivially copyable, has
// 1, 2, 4, 8 or 16 bytes and is aligned to its size.
template <typename T>
KVASIR_DEVICE T LoadGlobal(const T* from, Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#else
  emulation::CheckGlobal(from, sizeof(T), /*stores=*/false, site);
#endif
  return *from;
}
template <typename T>
KVASIR_DEVICE void StoreGlobal(T* to, const T& value,
                               Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#else
  emulation::CheckGlobal(to, sizeof(T), /*stores=*/true, site);
#endif
  *to = value;
}
template <typename T>
KVASIR_DEVICE T LoadShared(const T* from, Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#else
  emulation::CheckShared(from, sizeof(T), /*stores=*/false, site);
#endif
  return *from;
}
template <typename T>
KVASIR_DEVICE void StoreShared(T* to, const T& value,
                               Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
#else
  emulation::CheckShared(to, sizeof(T), /*stores=*/true, site);
#endif
  *to = value;
}

// Loads data that is read once and that no thread writes while the kernel runs.
// The data takes no space in the first-level cache. T has 2, 4, 8 or 16 bytes.
template <typename T>
KVASIR_DEVICE T LoadOnce(const T* from, Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  if constexpr (sizeof(T) == 16) {
    Vec16 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
        : "l"(from));
    return BitsAs<T>(v);
  } else if constexpr (sizeof(T) == 8) {
    uint64_t v;
    asm("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(from));
    return BitsAs<T>(v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return BitsAs<T>(v);
  } else {
    uint16_t v;
    asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return BitsAs<T>(v);
  }
#else
  emulation::CheckOnce(from, sizeof(T), site);
  return *from;
#endif
}

// Atomic loads and stores: other threads of the device never see a part of the
// value. T has 4 or 8 bytes. Relaxed accesses do not order other accesses; a
// fence before or after them does. After an acquire that reads the value of a
// release, the thread sees everything that was done before the release.
enum class Order : uint8_t { kRelaxed, kAcquire, kRelease };

template <Order order = Order::kRelaxed, typename T>
KVASIR_DEVICE T LoadAtomic(const T* from, Site site = Site::Here()) {
  static_assert(order != Order::kRelease, "a load cannot release");
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "T has 4 or 8 bytes");
#ifdef __CUDACC__
  (void)site;
  if constexpr (sizeof(T) == 8) {
    uint64_t v;
    if constexpr (order == Order::kAcquire) {
      asm volatile("ld.acquire.gpu.u64 %0, [%1];"
                   : "=l"(v)
                   : "l"(from)
                   : "memory");
    } else {
      asm volatile("ld.relaxed.gpu.u64 %0, [%1];"
                   : "=l"(v)
                   : "l"(from)
                   : "memory");
    }
    return BitsAs<T>(v);
  } else {
    uint32_t v;
    if constexpr (order == Order::kAcquire) {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];"
                   : "=r"(v)
                   : "l"(from)
                   : "memory");
    } else {
      asm volatile("ld.relaxed.gpu.u32 %0, [%1];"
                   : "=r"(v)
                   : "l"(from)
                   : "memory");
    }
    return BitsAs<T>(v);
  }
#else
  constexpr bool kAcquires = order == Order::kAcquire;
  if constexpr (sizeof(T) == 8) {
    return BitsAs<T>(emulation::LoadAtomic64(from, kAcquires, site));
  } else {
    return BitsAs<T>(emulation::LoadAtomic32(from, kAcquires, site));
  }
#endif
}

template <Order order = Order::kRelaxed, typename T>
KVASIR_DEVICE void StoreAtomic(T* to, T value, Site site = Site::Here()) {
  static_assert(order != Order::kAcquire, "a store cannot acquire");
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "T has 4 or 8 bytes");
#ifdef __CUDACC__
  (void)site;
  if constexpr (sizeof(T) == 8) {
    const auto v = BitsAs<uint64_t>(value);
    if constexpr (order == Order::kRelease) {
      asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
    } else {
      asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
    }
  } else {
    const auto v = BitsAs<uint32_t>(value);
    if constexpr (order == Order::kRelease) {
      asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
    } else {
      asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
    }
  }
#else
  constexpr bool kReleases = order == Order::kRelease;
  if constexpr (sizeof(T) == 8) {
    emulation::StoreAtomic64(to, BitsAs<uint64_t>(value), kReleases, site);
  } else {
    emulation::StoreAtomic32(to, BitsAs<uint32_t>(value), kReleases, site);
  }
#endif
}

// Relaxed atomic read-modify-writes on global or shared memory. They return the
// previous value; if it is not used, nvcc generates the cheaper instruction
// `red`. With Scope::kCta, only threads of one CTA may access the address.
template <Scope scope = Scope::kGpu>
KVASIR_DEVICE uint32_t AtomicAdd(uint32_t* at, uint32_t value,
                                 Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return scope == Scope::kCta ? atomicAdd_block(at, value)
                              : atomicAdd(at, value);
#else
  return emulation::Atomic(emulation::AtomicKind::kAdd, at, value, 0,
                           scope == Scope::kGpu, site);
#endif
}
template <Scope scope = Scope::kGpu>
KVASIR_DEVICE uint64_t AtomicAdd(uint64_t* at, uint64_t value,
                                 Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  auto* const word = reinterpret_cast<unsigned long long*>(at);  // NOLINT
  return scope == Scope::kCta ? atomicAdd_block(word, value)
                              : atomicAdd(word, value);
#else
  return emulation::AtomicAdd64(at, value, scope == Scope::kGpu, site);
#endif
}
template <Scope scope = Scope::kGpu>
KVASIR_DEVICE float AtomicAdd(float* at, float value,
                              Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return scope == Scope::kCta ? atomicAdd_block(at, value)
                              : atomicAdd(at, value);
#else
  return BitsAs<float>(emulation::Atomic(emulation::AtomicKind::kAddFloat, at,
                                         BitsAs<uint32_t>(value), 0,
                                         scope == Scope::kGpu, site));
#endif
}
template <Scope scope = Scope::kGpu>
KVASIR_DEVICE int32_t AtomicMax(int32_t* at, int32_t value,
                                Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return scope == Scope::kCta ? atomicMax_block(at, value)
                              : atomicMax(at, value);
#else
  return BitsAs<int32_t>(emulation::Atomic(emulation::AtomicKind::kMax, at,
                                           BitsAs<uint32_t>(value), 0,
                                           scope == Scope::kGpu, site));
#endif
}
// Compare-and-swap: stores `value` if the current value is `expected`.
template <Scope scope = Scope::kGpu>
KVASIR_DEVICE uint32_t AtomicCas(uint32_t* at, uint32_t expected,
                                 uint32_t value, Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return scope == Scope::kCta ? atomicCAS_block(at, expected, value)
                              : atomicCAS(at, expected, value);
#else
  return emulation::Atomic(emulation::AtomicKind::kCas, at, value, expected,
                           scope == Scope::kGpu, site);
#endif
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
