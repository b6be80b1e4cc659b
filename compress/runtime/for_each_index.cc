#include "compress/runtime/for_each_index.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace kvasir::compress {

void ForEachIndex(int64_t count, int threads,
                  const std::function<void(int64_t)>& work) {
  threads = static_cast<int>(std::min<int64_t>(threads, count));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::vector<std::exception_ptr> failures(static_cast<size_t>(threads));
  std::vector<std::jthread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      try {
        at::set_num_threads(1);
        for (int64_t i = t; i < count; i += threads) work(i);
      } catch (...) {
        failures[static_cast<size_t>(t)] = std::current_exception();
      }
    });
  }
  workers.clear();  // waits for all threads
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace kvasir::compress
