// The files of a checkpoint's tokenizer as one zip archive, for gateways that
// tokenize themselves.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace kvasir::router {

struct TokenizerArchive {
  std::string zip;
  // In hex.
  std::string sha256;
};

// The most that the known gateways accept.
inline constexpr size_t kMaxBundleFiles = 50;
inline constexpr size_t kMaxBundleBytes = 200'000'000;

// Archives tokenizer files, chat templates and their two configuration files,
// but no weights. The same files give the same bytes. NOT_FOUND for a folder
// without any; FAILED_PRECONDITION above the limits.
absl::StatusOr<TokenizerArchive> ArchiveTokenizer(const std::string& folder);

// Creates the archive when it is first requested.
// Threads: any thread, but it reads and compresses files, so not one that
//   others wait for.
class TokenizerBundle {
 public:
  explicit TokenizerBundle(std::string folder) : folder_(std::move(folder)) {}

  // Returns ArchiveTokenizer's errors, which are not kept.
  absl::StatusOr<std::shared_ptr<const TokenizerArchive>> Get();

 private:
  const std::string folder_;
  base::Mutex mutex_;
  std::shared_ptr<const TokenizerArchive> archive_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
