// Memory space in the type: a pointer into device memory, which the host cannot
// look behind, and what becomes of it inside a launch. C++17.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvasir::kernels {

// An address of device memory, of `T` in elements. There is no operator* and no
// operator[]: only code that a launch runs may read or write there. Null stays
// null when it is moved, so that sizes can be counted without memory.
template <typename T>
class DevicePtr {
 public:
  constexpr DevicePtr() = default;
  constexpr DevicePtr(std::nullptr_t) {}  // NOLINT: as null pointers are
  explicit constexpr DevicePtr(T* address) : address_(address) {}
  // To const, and to void.
  template <typename U,
            typename = std::enable_if_t<std::is_convertible_v<U*, T*>>>
  constexpr DevicePtr(DevicePtr<U> other)  // NOLINT: as pointers convert
      : address_(other.device_address()) {}

  // For launches and copies; never to be dereferenced elsewhere.
  constexpr T* device_address() const { return address_; }
  constexpr explicit operator bool() const { return address_ != nullptr; }

  // The same memory as numbers of another type.
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

// What lies `bytes` further on.
inline DevicePtr<const void> OffsetBytes(DevicePtr<const void> pointer,
                                         int64_t bytes) {
  return pointer.as<const char>() + bytes;
}
inline const void* OffsetBytes(const void* pointer, int64_t bytes) {
  return static_cast<const char*>(pointer) + bytes;
}

// An op's parameters are a template of the kind of their device pointers:
// `DevicePtr` where the host makes them, `LaunchPtr` (plain) in the code of a
// back end. Both look the same in memory; a launch makes one of the other.
template <typename T>
using LaunchPtr = T*;

// S<DevicePtr> as S<LaunchPtr>, DevicePtr<T> as T*.
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
