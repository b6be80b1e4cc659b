#pragma once

#include <exception>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace kvasir::compress {

// Runs `work` and returns its Status or StatusOr. An exception that it throws
// (c10::Error, out of memory) becomes an Internal error.
template <typename Work>
auto CatchTorch(Work&& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& failure) {
    return absl::InternalError(absl::StrCat("libtorch: ", failure.what()));
  }
}

}  // namespace kvasir::compress
