// Replaces a CUDA stream's handle on devices without a GPU; libraries that only
// tests load enqueue on it. C++17 without Abseil.
#pragma once

namespace kvasir::kernels {

struct HostWork {
  // Enqueues run(argument). The thread that waits for the stream calls it in
  // order, with the device's memory accessible: once, or once per replay if it
  // was captured. At the end `release` is called if it is not null.
  void (*enqueue)(HostWork* stream, void (*run)(void* argument), void* argument,
                  void (*release)(void* argument)) = nullptr;
  // True while the stream captures. Read only by the thread that enqueues.
  bool capturing = false;
};

}  // namespace kvasir::kernels
