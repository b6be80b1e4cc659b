// Lets tests observe the calls that a thread makes to a device, in order to
// count copies and allocations and to compare lists of launches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

// Describes one launch: the op, the number of rows, the width of each result (0
// if the op has none), and the device addresses that the launch uses. The
// address of its scratch memory comes last. The addresses must not be
// dereferenced.
struct OpLaunch {
  const char* op = "";
  int64_t rows = 0;
  int64_t width = 0;
  std::array<const void*, 12> addresses = {};
};

// Receives the calls that a thread makes to a device.
//
// Threads: only the observed thread calls it.
class DeviceObserver {
 public:
  virtual ~DeviceObserver() = default;
  virtual void OnUpload(size_t bytes) = 0;
  virtual void OnReadBack(size_t bytes) = 0;
  virtual void OnLaunch(const OpLaunch& launch) = 0;
  virtual void OnAllocate(size_t bytes) = 0;

  // Returns the observer of the calling thread, or null.
  static DeviceObserver* Current();
};

// While this object lives, `observer` receives the calls of the thread that
// made the object. A thread can have only one such object at a time.
class ObserveDevice {
 public:
  explicit ObserveDevice(DeviceObserver* observer);
  ~ObserveDevice();
  ObserveDevice(const ObserveDevice&) = delete;
  ObserveDevice& operator=(const ObserveDevice&) = delete;
};

// Describes the launch of an op with these parameters.
template <typename Params>
OpLaunch DescribeLaunch(const char* op, const Params& params) {
  OpLaunch launch = {.op = op};
  if constexpr (requires { params.num_rows; }) {
    launch.rows = params.num_rows;
  } else if constexpr (requires { params.num_tokens; }) {
    launch.rows = params.num_tokens;
  } else if constexpr (requires { params.num_sequences; }) {
    launch.rows = params.num_sequences;
  } else if constexpr (requires { params.num_pairs; }) {
    launch.rows = params.num_pairs;
  }
  if constexpr (requires { params.weight.n; }) {
    launch.width = params.weight.n;
  } else if constexpr (requires { params.columns; }) {
    launch.width = params.columns;
  } else if constexpr (requires { params.hidden; }) {
    launch.width = params.hidden;
  } else if constexpr (requires { params.features; }) {
    launch.width = params.features;
  } else if constexpr (requires { params.vocab_count; }) {
    launch.width = params.vocab_count;
  } else if constexpr (requires { params.vocab; }) {
    launch.width = params.vocab;
  } else if constexpr (requires { params.num_heads; }) {
    launch.width = params.num_heads;
  }
  return launch;
}

}  // namespace kvasir::kernels
