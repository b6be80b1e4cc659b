// What stands for a CUDA stream's handle on devices without a GPU: libraries
// that only tests load enqueue on it. C++17 and free of Abseil.
#pragma once

namespace kvasir::kernels {

struct HostWork {
  // Enqueues run(argument), which is called when the stream comes by, on the
  // thread that waits for it, with the device's memory there: once, or as often
  // as what the stream captured is replayed. Then `release` is called, where
  // there is one.
  void (*enqueue)(HostWork* stream, void (*run)(void* argument), void* argument,
                  void (*release)(void* argument)) = nullptr;
  // What is enqueued now is captured. To be read by the thread that enqueues.
  bool capturing = false;
};

}  // namespace kvasir::kernels
