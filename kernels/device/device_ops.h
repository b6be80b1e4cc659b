// A table of the functions by which a GPU's back end implements ops. Functions
// are found by the op's name. The stream owns the table, so an op's host code
// need not be linked with a back end. C++17 without Abseil, because
// op_table/op_table.h includes this.
#pragma once

#include <cstddef>
#include <cstring>
#include <typeinfo>

#include "kernels/device/device_ptr.h"
#include "kernels/device/launcher.h"

namespace kvasir::kernels {

// A function that enqueues the kernels of one op. The op's host code has
// already checked the parameters and refused those that the device does
// not support.
template <typename... Params>
using DeviceFunction = void (*)(typename InLaunch<Params>::argument...,
                                Launcher& launcher);

// An entry of the table: an op's name and a pointer to its function. The type
// of the function is stored as a name, which is compared before the function
// is called.
struct DeviceOp {
  const char* op;
  const char* type;
  void (*function)();
};

// Makes an entry of the table. Params are the template arguments of the op's
// OpKernels (dispatch.h).
template <typename... Params>
DeviceOp MakeDeviceOp(const char* op, DeviceFunction<Params...> function) {
  return {op, typeid(DeviceFunction<Params...>).name(),
          reinterpret_cast<void (*)()>(function)};
}

struct DeviceOps {
  const DeviceOp* ops = nullptr;
  size_t count = 0;

  // Returns the entry of the op, or null if the table has none.
  const DeviceOp* Find(const char* op) const {
    for (size_t i = 0; i < count; ++i) {
      if (std::strcmp(ops[i].op, op) == 0) return &ops[i];
    }
    return nullptr;
  }
};

}  // namespace kvasir::kernels
