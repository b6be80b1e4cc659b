#pragma once

#include <cstdint>
#include <functional>

namespace kvasir::compress {

// Runs `work(index)` for every index < count on up to `threads` threads; index
// i runs on thread i % threads. Inside `work` libtorch uses a single thread.
// The first exception is rethrown in the caller.
void ForEachIndex(int64_t count, int threads,
                  const std::function<void(int64_t)>& work);

}  // namespace kvasir::compress
