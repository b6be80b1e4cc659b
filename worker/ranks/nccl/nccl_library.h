// Opens NVIDIA's NCCL at run time. Nothing links it, so the same program starts
// on hosts with and without it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/ranks/nccl/nccl_abi.h"

namespace kvasir::worker {

// An opened library, not older than nccl::kLeastVersion. It stays loaded.
class Nccl {
 public:
  // Opens the first of these files that the loader accepts, that has every
  // function and is new enough. NOT_FOUND says for each file what is wrong with
  // it, and what to do.
  static absl::StatusOr<std::unique_ptr<Nccl>> Open(
      const std::vector<std::string>& files);

  // The places to try: the loader's own (LD_LIBRARY_PATH, ldconfig), then the
  // CUDA toolkit's folder.
  static std::vector<std::string> DefaultFiles();

  const nccl::Functions& functions() const { return functions_; }
  int version() const { return version_; }

  // Returns an error like "what: remote process exited or there was a network
  // error (6); last error: ...". UNAVAILABLE for errors of other ranks and of
  // the system between them, else INTERNAL.
  absl::Status Error(const std::string& what, nccl::Result result) const;

 private:
  Nccl(const nccl::Functions& functions, int version)
      : functions_(functions), version_(version) {}

  const nccl::Functions functions_;
  const int version_;
};

// "2.28.9"
std::string NcclVersionName(int version);

}  // namespace kvasir::worker
