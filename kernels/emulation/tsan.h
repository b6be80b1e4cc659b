// Functions that describe an emulated launch to ThreadSanitizer, so that it
// finds races of kernels. Each CUDA thread is a fiber; a switch between fibers
// does not order their accesses. The emulator is not instrumented, so it
// reports each access of a kernel through these functions. Without
// -fsanitize=thread, the functions for atomics are plain accesses and the
// others do nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(KVASIR_EMULATION_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
uint32_t __tsan_atomic32_load(const volatile uint32_t* at, int order);
uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int order);
void __tsan_atomic32_store(volatile uint32_t* at, uint32_t value, int order);
void __tsan_atomic64_store(volatile uint64_t* at, uint64_t value, int order);
uint32_t __tsan_atomic32_exchange(volatile uint32_t* at, uint32_t value,
                                  int order);
uint64_t __tsan_atomic64_exchange(volatile uint64_t* at, uint64_t value,
                                  int order);
}
#endif

namespace kvasir::kernels::emulation::tsan {

#if defined(KVASIR_EMULATION_TSAN)
inline constexpr bool kOn = true;
inline void* CreateFiber() { return __tsan_create_fiber(0); }
inline void DestroyFiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* CurrentFiber() { return __tsan_get_current_fiber(); }
inline void SwitchTo(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }
inline void Acquire(void* tag) { __tsan_acquire(tag); }
inline void Release(void* tag) { __tsan_release(tag); }
inline void Read(const void* at, size_t bytes) {
  __tsan_read_range(const_cast<void*>(at), bytes);
}
inline void Write(void* at, size_t bytes) { __tsan_write_range(at, bytes); }
// Atomic accesses. ThreadSanitizer sees all of them as relaxed (order 0);
// ordering.cc reports what they order.
inline uint32_t Load32(const void* at) {
  return __tsan_atomic32_load(static_cast<const volatile uint32_t*>(at), 0);
}
inline uint64_t Load64(const void* at) {
  return __tsan_atomic64_load(static_cast<const volatile uint64_t*>(at), 0);
}
inline void Store32(void* at, uint32_t value) {
  __tsan_atomic32_store(static_cast<volatile uint32_t*>(at), value, 0);
}
inline void Store64(void* at, uint64_t value) {
  __tsan_atomic64_store(static_cast<volatile uint64_t*>(at), value, 0);
}
inline uint32_t Exchange32(void* at, uint32_t value) {
  return __tsan_atomic32_exchange(static_cast<volatile uint32_t*>(at), value,
                                  0);
}
inline uint64_t Exchange64(void* at, uint64_t value) {
  return __tsan_atomic64_exchange(static_cast<volatile uint64_t*>(at), value,
                                  0);
}
#else
inline constexpr bool kOn = false;
inline void* CreateFiber() { return nullptr; }
inline void DestroyFiber(void*) {}
inline void* CurrentFiber() { return nullptr; }
inline void SwitchTo(void*) {}
inline void Acquire(void*) {}
inline void Release(void*) {}
inline void Read(const void*, size_t) {}
inline void Write(void*, size_t) {}
inline uint32_t Load32(const void* at) {
  return *static_cast<const volatile uint32_t*>(at);
}
inline uint64_t Load64(const void* at) {
  return *static_cast<const volatile uint64_t*>(at);
}
inline void Store32(void* at, uint32_t value) {
  *static_cast<volatile uint32_t*>(at) = value;
}
inline void Store64(void* at, uint64_t value) {
  *static_cast<volatile uint64_t*>(at) = value;
}
inline uint32_t Exchange32(void* at, uint32_t value) {
  const uint32_t old = Load32(at);
  Store32(at, value);
  return old;
}
inline uint64_t Exchange64(void* at, uint64_t value) {
  const uint64_t old = Load64(at);
  Store64(at, value);
  return old;
}
#endif

}  // namespace kvasir::kernels::emulation::tsan
