// RawArray: an array for the emulator's code that runs inside a launch.
// ThreadSanitizer would mistake a call of an allocator or of memcpy in such
// code for an access by the kernel. Therefore this array gets pages from the
// system directly and grows without copying.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <type_traits>

namespace kvasir::kernels::emulation {

// Returns zeroed pages. A direct system call is used because ThreadSanitizer
// intercepts mmap().
inline void* MapPages(size_t bytes) {
  const long at = ::syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == -1) std::abort();
  // NOLINT: the system returns an address as an integer
  return reinterpret_cast<void*>(at);
}
inline void UnmapPages(void* data, size_t bytes) {
  if (data != nullptr) ::syscall(SYS_munmap, data, bytes);
}

// An array whose elements start as zero bytes in fresh memory. Not copyable.
template <typename T>
class RawArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  RawArray() = default;
  RawArray(const RawArray&) = delete;
  RawArray& operator=(const RawArray&) = delete;

  size_t size() const { return size_; }
  T& operator[](size_t i) {
    return data_[i];
  }  // NOLINT: the caller ensures i < size()
  const T& operator[](size_t i) const { return data_[i]; }
  void Push(const T& value) {
    Resize(size_ + 1);
    data_[size_ - 1] = value;
  }
  T Pop() { return data_[--size_]; }
  // Removes element i and moves the last element to its place.
  T Take(size_t i) {
    const T taken = data_[i];
    data_[i] = data_[--size_];
    return taken;
  }
  void Clear() { size_ = 0; }
  void Swap(RawArray& other) {
    T* const data = data_;
    const size_t size = size_;
    const size_t bytes = bytes_;
    data_ = other.data_;
    size_ = other.size_;
    bytes_ = other.bytes_;
    other.data_ = data;
    other.size_ = size;
    other.bytes_ = bytes;
  }
  // New elements are zero if the memory was never used before; otherwise their
  // content is arbitrary.
  void Resize(size_t size) {
    const size_t least = size * sizeof(T);  // NOLINT: T may be a pointer
    if (least > bytes_) Grow(least);
    size_ = size;
  }
  // Frees the memory. There is no destructor, so that structs with such arrays
  // stay trivial.
  void Free() {
    UnmapPages(data_, bytes_);
    data_ = nullptr;
    size_ = bytes_ = 0;
  }

 private:
  void Grow(size_t least) {
    size_t bytes = bytes_ == 0 ? 4096 : 2 * bytes_;
    while (bytes < least) bytes *= 2;
    if (data_ == nullptr) {
      data_ = static_cast<T*>(MapPages(bytes));
    } else {
      const long at =
          ::syscall(SYS_mremap, data_, bytes_, bytes, MREMAP_MAYMOVE);
      if (at == -1) std::abort();
      data_ =
          reinterpret_cast<T*>(at);  // NOLINT: the system returns an address
    }
    bytes_ = bytes;
  }

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t bytes_ = 0;
};

}  // namespace kvasir::kernels::emulation
