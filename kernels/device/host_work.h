// HostWork takes the place of a CUDA stream's handle on devices without a GPU.
// Fake libraries in tests enqueue their work on it. C++17 without Abseil.
#pragma once

namespace kvasir::kernels {

struct HostWork {
  // Enqueues the call run(argument). The thread that waits for the stream makes
  // this call in the stream's order, while the device's memory is accessible.
  // If the stream was capturing, each replay makes the call once. When run()
  // will not be called again, `release` is called, unless it is null.
  void (*enqueue)(HostWork* stream, void (*run)(void* argument), void* argument,
                  void (*release)(void* argument)) = nullptr;
  // True while the stream captures its work for a replay. Only the thread that
  // enqueues may read it.
  bool capturing = false;
};

}  // namespace kvasir::kernels
