#pragma once

#include <cstdint>
#include <functional>

namespace kvasir::compress {

// Runs `work(index)` for every index < count on up to `threads` threads; index
// i runs on thread i % threads. If there are several threads, libtorch is
// single-threaded on each. If calls throw, one of the exceptions is rethrown.
void ForEachIndex(int64_t count, int threads,
                  const std::function<void(int64_t)>& work);

}  // namespace kvasir::compress
