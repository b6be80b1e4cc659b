// What stands for a CUDA stream's handle on devices without a GPU: libraries
// that only tests load enqueue on it. C++17 and free of Abseil.
#pragma once

namespace kvasir::kernels {

struct HostWork {
  // Enqueues run(argument), which is called once: when the stream comes by, on
  // the thread that waits for it, with the device's memory there.
  void (*enqueue)(HostWork* stream, void (*run)(void* argument),
                  void* argument) = nullptr;
};

}  // namespace kvasir::kernels
