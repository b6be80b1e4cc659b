// DevicePtr: a pointer into device memory, which host code cannot dereference.
// A launch converts it to a plain pointer. C++17.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvasir::kernels {

// An address in device memory; offsets are in elements of `T`. It has no
// operator* and no operator[], because only code that a launch runs may access
// the memory. Adding an offset to a null pointer gives a null pointer, so that
// the same code can count sizes without any memory (Workspace::Counting).
template <typename T>
class DevicePtr {
 public:
  constexpr DevicePtr() = default;
  // NOLINT: implicit, as nullptr converts to every pointer type
  constexpr DevicePtr(std::nullptr_t) {}
  explicit constexpr DevicePtr(T* address) : address_(address) {}
  // Converts a pointer to T to a pointer to const T or to void.
  template <typename U,
            typename = std::enable_if_t<std::is_convertible_v<U*, T*>>>
  constexpr DevicePtr(DevicePtr<U> other)  // NOLINT: implicit, as for pointers
      : address_(other.device_address()) {}

  // The plain address, for launches and copies. Other code must not dereference
  // it.
  constexpr T* device_address() const { return address_; }
  constexpr explicit operator bool() const { return address_ != nullptr; }

  // The same address, as a pointer to elements of another type.
  template <typename U>
  constexpr DevicePtr<U> as() const {
    using Void = std::conditional_t<std::is_const_v<T>, const void, void>;
    return DevicePtr<U>(static_cast<U*>(static_cast<Void*>(address_)));
  }

  constexpr DevicePtr operator+(int64_t elements) const {
    return address_ == nullptr ? *this : DevicePtr(address_ + elements);
  }

  friend constexpr bool operator==(DevicePtr a, DevicePtr b) {
    return a.address_ == b.address_;
  }
  friend constexpr bool operator!=(DevicePtr a, DevicePtr b) {
    return !(a == b);
  }

 private:
  T* address_ = nullptr;
};

inline DevicePtr<const void> OffsetBytes(DevicePtr<const void> pointer,
                                         int64_t bytes) {
  return pointer.as<const char>() + bytes;
}
inline const void* OffsetBytes(const void* pointer, int64_t bytes) {
  return static_cast<const char*>(pointer) + bytes;
}

// The struct of an op's parameters is a template over the type of its pointers
// to device memory: `DevicePtr` in host code, `LaunchPtr` (a plain pointer) in
// the code of a back end. Both have the same layout; a launch converts the
// first to the second.
template <typename T>
using LaunchPtr = T*;

// Converts S<DevicePtr> to S<LaunchPtr>, and DevicePtr<T> to T*.
template <typename T>
struct InLaunch;
template <template <template <typename> class> class S>
struct InLaunch<S<DevicePtr>> {
  using type = S<LaunchPtr>;
  using argument = const type&;
};
template <typename T>
struct InLaunch<DevicePtr<T>> {
  using type = T*;
  using argument = T*;
};

}  // namespace kvasir::kernels
