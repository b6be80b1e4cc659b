// Pointers into workspace memory, which are null while it is only counted.
#pragma once

#include <cstdint>

namespace kvasir::worker {

template <typename T>
T* Advance(T* pointer, int64_t count) {
  return pointer == nullptr ? nullptr : pointer + count;
}

}  // namespace kvasir::worker
