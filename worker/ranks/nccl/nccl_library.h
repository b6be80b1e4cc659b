// Loads NVIDIA's NCCL at run time. The program does not link to it, so that it
// also starts on hosts without NCCL.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/ranks/nccl/nccl_abi.h"

namespace kvasir::worker {

// The loaded library; its version is at least nccl::kLeastVersion. It stays
// loaded until the process ends.
class Nccl {
 public:
  // Loads the first of these files that can be loaded, has every function and
  // is new enough. NOT_FOUND lists for each file why it was not used, and says
  // what to do.
  static absl::StatusOr<std::unique_ptr<Nccl>> Open(
      const std::vector<std::string>& files);

  // The files to try: first where the dynamic loader searches (LD_LIBRARY_PATH,
  // ldconfig), then in the CUDA toolkit's folder.
  static std::vector<std::string> DefaultFiles();

  const nccl::Functions& functions() const { return functions_; }
  int version() const { return version_; }

  // Returns an error like "WHAT: remote process exited or there was a network
  // error (6); last error: ...". UNAVAILABLE if another rank or the system (for
  // example the network) caused it, otherwise INTERNAL.
  absl::Status Error(const std::string& what, nccl::Result result) const;

 private:
  Nccl(const nccl::Functions& functions, int version)
      : functions_(functions), version_(version) {}

  const nccl::Functions functions_;
  const int version_;
};

// Returns a text like "2.28.9".
std::string NcclVersionName(int version);

}  // namespace kvasir::worker
