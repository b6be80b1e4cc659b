#include "bench/gpu/gpu_options.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kvasir::bench {

absl::StatusOr<kernels::CudaDeviceOptions> GpuOptions(const std::string& name,
                                                      Products products) {
  absl::string_view ordinal = name;
  kernels::CudaDeviceOptions options;
  options.deterministic = products == Products::kOwn;
  if (name != "cuda" && (!absl::ConsumePrefix(&ordinal, "cuda:") ||
                         !absl::SimpleAtoi(ordinal, &options.ordinal))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown device ", name, ": want cuda, cuda:N or emulated"));
  }
  return options;
}

}  // namespace kvasir::bench
