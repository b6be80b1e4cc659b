#include "worker/ranks/nccl/nccl_library.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvasir::worker {

using nccl::Functions;
using nccl::Result;

absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Open(
    const std::vector<std::string>& files) {
  std::vector<std::string> tried;
  for (const std::string& file : files) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      tried.emplace_back(dlerror());
      continue;
    }
    Functions functions;
    std::string wrong;
    nccl::ForFunctions(functions, [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          dlsym(library, name));
      if (function == nullptr && wrong.empty()) {
        wrong = absl::StrCat("has no ", name);
      }
    });
    int version = 0;
    if (wrong.empty() && (functions.ncclGetVersion(&version) != Result::kOk ||
                          version < nccl::kLeastVersion)) {
      wrong = absl::StrCat("is NCCL ", NcclVersionName(version), ", want ",
                           NcclVersionName(nccl::kLeastVersion), " or later");
    }
    if (wrong.empty())
      return std::unique_ptr<Nccl>(new Nccl(functions, version));
    tried.push_back(absl::StrCat(file, ": ", wrong));
    dlclose(library);
  }
  return absl::NotFoundError(absl::StrCat(
      "NCCL: no usable library was found; tried ", absl::StrJoin(tried, "; "),
      ". Install libnccl2, or name its folder in "
      "LD_LIBRARY_PATH"));
}

std::vector<std::string> Nccl::DefaultFiles() {
  return {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"};
}

absl::Status Nccl::Error(const std::string& what, Result result) const {
  std::string text =
      absl::StrCat(what, ": ", functions_.ncclGetErrorString(result), " (",
                   static_cast<int>(result), ")");
  // With a null communicator, this returns the calling thread's last error on
  // any communicator.
  const char* const last = functions_.ncclGetLastError(nullptr);
  if (last != nullptr && *last != '\0') {
    absl::StrAppend(&text, "; last error: ", last);
  }
  const bool of_others =
      result == Result::kRemoteError || result == Result::kSystemError;
  return of_others ? absl::UnavailableError(text) : absl::InternalError(text);
}

std::string NcclVersionName(int version) {
  // Releases up to 2.8 have the version 1000 * major + 100 * minor + patch.
  if (version < 10000) {
    return absl::StrCat(version / 1000, ".", version / 100 % 10, ".",
                        version % 100);
  }
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

}  // namespace kvasir::worker
